"""What the quantization of each site alone does to the output: estimated for all at once, or measured one by one."""
