"""Quantizer plug-ins: what one is, how it is found, and what it needs to check its options.

This is all of pt2qa that a plug-in may import, beside :mod:`pt2qa.errors`. Nothing here imports torch before a function
that needs it is called.
"""

from __future__ import annotations

from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.plugins.abilities import fusable_of, levels_of, refusal, rules_of, spell
from pt2qa.plugins.generic import GenericPlugin
from pt2qa.plugins.options import Option, check_options, describe, options_of
from pt2qa.plugins.protocol import QuantizerPlugin
from pt2qa.plugins.registry import GROUP, available, quantizer, resolve, unavailable
from pt2qa.plugins.rules import DoesNotApplyError, Found, Need, Rule, Severity
from pt2qa.plugins.scopes import Overrides, Scope, called_modules, check_overrides, modules_of, op_type, scopes_in
from pt2qa.plugins.spelling import Base, Place, places_of, spell_edits

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
    "OverridePlan",
    "Place",
    "fusable_of",
    "levels_of",
    "places_of",
    "refusal",
    "spell",
    "spell_edits",
]
