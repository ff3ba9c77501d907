"""What every op reads and makes, with histograms, and how two profiles differ."""
