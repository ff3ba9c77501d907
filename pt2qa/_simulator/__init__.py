"""One graph that computes the reference, the quantized model, or any choice of sites between."""
