"""The samples of a data set on which the quantized model is furthest from the reference."""
