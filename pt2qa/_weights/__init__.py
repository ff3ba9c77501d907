"""Weight by weight: how far each dequantized weight is from the float one."""
