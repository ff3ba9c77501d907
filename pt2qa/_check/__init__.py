"""The structure check: what will go wrong when a model is quantized, and how to fix it."""
