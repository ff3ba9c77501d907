"""Weight-by-weight comparison of dequantized and float weights."""
