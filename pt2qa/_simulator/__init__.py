"""One program that computes the reference, the quantized model, or any choice of quantized sites."""
