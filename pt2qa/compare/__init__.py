"""Comparisons of a reference and a quantized graph: layer by layer, and weight by weight."""

from pt2qa.compare.layers import compare_layers
from pt2qa.compare.weights import compare_weights

__all__ = ["compare_layers", "compare_weights"]
