"""Arm's TOSA as a pt2qa quantizer plug-in: what Ethos-U and VGF must compute, on Arm's reference model.

It loads without ExecuTorch and Arm's tools, and says at its first use which are missing.
"""

from __future__ import annotations

from pt2qa_arm.backend import TOSABackend
from pt2qa_arm.plugin import PLUGIN, TOSA

__all__ = ["PLUGIN", "TOSA", "TOSABackend"]
