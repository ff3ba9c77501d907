"""Exit codes beside 0 and 1."""

INTERRUPTED = 130  # Ctrl-C, as in shells: 128 plus the number of the signal
FAILED = 2  # nothing was found out: bad usage, or stdout that cannot be written to
