"""``diagnose``: what causes the error, where, what to do, and what that was measured to give."""
