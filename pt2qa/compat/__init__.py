"""The names of older tools, for scripts that call them: thin layers over pt2qa's own functions."""
