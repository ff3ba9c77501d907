"""Several quantizer configurations of one model, side by side."""
