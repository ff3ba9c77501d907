"""The rules, in files by what they look at."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from pt2qa.plugins import Rule

_ORDER = (
    # what costs most and is free to fix
    "unfused_pair "
    # the model and its capture
    "capture_fails aliased_inputs train_mode plain_program decomposed_first nested_graph invalid_fold partial_write "
    "integer_scalar dead_code added_zero opaque_recurrent unfoldable_batch_norm random_op module_never_called "
    "fixed_batch no_float_output shared_module shared_weight opaque_attention written_buffer "
    # what the quantizer annotates
    "quantizer_fails foreign_quantizer no_coverage broken_share backend_spec unmatched_filter integer_observed "
    "float_op half_quantized lost_write in_place_spelling residual_add mixed_parameters dynamic_conv strict_differs "
    "coverage float_island fixed_range "
    # the numbers
    "never_calibrated nonfinite_observed degenerate_scale dead_channel channel_range saturation range_outliers "
    "unused_range requantize_mismatch bias_overflow"
)
"""The rules in the order in which the screen shows what they find, within one severity."""

_FOUND: dict[str, Rule] = {
    name: value
    for file in iter_modules(__path__)
    for name, value in vars(import_module(f"{__name__}.{file.name}")).items()
    if isinstance(value, Rule)
}

RULES: dict[str, Rule] = {rule.id: rule for rule in map(_FOUND.__getitem__, _ORDER.split())}
"""Every rule of pt2qa by id; a plug-in may bring more for its own backend."""
