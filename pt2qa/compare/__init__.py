"""Comparisons: layer by layer, module by module, weight by weight, and one quantizer with another."""

from pt2qa.compare.layers import compare_layers
from pt2qa.compare.modules import compare_modules
from pt2qa.compare.quantizers import compare_quantizers
from pt2qa.compare.weights import compare_weights

__all__ = ["compare_layers", "compare_modules", "compare_quantizers", "compare_weights"]
