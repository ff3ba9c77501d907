"""What the quantization of each site costs the output."""
