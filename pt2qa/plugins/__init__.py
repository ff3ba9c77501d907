"""Quantizer plug-ins: what a plug-in is, how it is found, and how it checks its options.

Apart from :mod:`pt2qa.errors`, this is all of pt2qa that a plug-in may import. Functions here import torch only when
they need it.
"""

from __future__ import annotations

from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.plugins.abilities import (
    backend_of,
    fusable_of,
    levels_of,
    quantizer_code,
    rules_of,
    unsupported_reason,
)
from pt2qa.plugins.backend import Backend, DeployedProgram, Ran
from pt2qa.plugins.backend_spec import BackendSpec, OpSpec, SpecLine, TensorSpec
from pt2qa.plugins.code import Base, NamedOp, edited_quantizer_code, modules_in_float, ops_by_name
from pt2qa.plugins.generic import GenericPlugin
from pt2qa.plugins.options import Option, check_options, describe, options_of
from pt2qa.plugins.protocol import QuantizerPlugin
from pt2qa.plugins.registry import GROUP, available, quantizer, resolve, spec_of, unavailable
from pt2qa.plugins.rules import DoesNotApplyError, Found, Need, Rule, Severity
from pt2qa.plugins.scopes import Overrides, Scope, called_modules, check_overrides, modules_of, op_type, scopes_in

__all__ = [
    # the contract
    "GROUP",
    "QuantizerPlugin",
    # finding one
    "GenericPlugin",
    "available",
    "quantizer",
    "resolve",
    "unavailable",
    # options
    "Option",
    "check_options",
    "describe",
    "options_of",
    # lowering and running
    "Backend",
    "DeployedProgram",
    "Ran",
    "backend_of",
    # what a backend takes
    "BackendSpec",
    "OpSpec",
    "SpecLine",
    "TensorSpec",
    "spec_of",
    # settings for single modules and op types
    "Overrides",
    "Scope",
    "called_modules",
    "check_overrides",
    "modules_of",
    "op_type",
    "scopes_in",
    # rules of the structure check
    "DoesNotApplyError",
    "Found",
    "Need",
    "Rule",
    "Severity",
    "rules_of",
    # override plans
    "Base",
    "Edit",
    "NamedOp",
    "OverridePlan",
    "edited_quantizer_code",
    "fusable_of",
    "levels_of",
    "modules_in_float",
    "ops_by_name",
    "quantizer_code",
    "unsupported_reason",
]
