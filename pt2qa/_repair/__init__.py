"""Accuracy at no cost at run time: ranges chosen by what they do to the output."""
