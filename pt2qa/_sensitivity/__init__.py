"""How quantizing each site alone affects the output: estimated for all sites at once, or measured one by one."""
