"""From a capture to a pair: prepare, calibrate, convert, and pair the graphs."""
