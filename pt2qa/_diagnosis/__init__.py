"""``diagnose``: what causes the error, where, what to do, and the measured gain."""
