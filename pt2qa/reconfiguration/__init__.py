"""A quantizer configuration that meets a target: searched on the simulator, converted, and measured."""

from __future__ import annotations

from pt2qa.reconfiguration.analysis import reconfigure
from pt2qa.reconfiguration.target import Budget, Target

__all__ = ["Budget", "Target", "reconfigure"]
