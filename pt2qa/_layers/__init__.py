"""Layer-by-layer and module-by-module comparison of the quantized model with the reference."""
