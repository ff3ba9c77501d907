"""Whether a quantizer behaves: properties that hold on small models."""
