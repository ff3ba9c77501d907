"""Layer by layer and module by module: how far the quantized model is from the reference."""
