"""How a quantizer fares on small models."""
