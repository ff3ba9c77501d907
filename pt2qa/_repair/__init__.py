"""Accuracy at no cost at run time: ranges and biases chosen by what they do to the output."""
