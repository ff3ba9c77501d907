"""Conformance of a quantizer: properties that must hold on small models."""
