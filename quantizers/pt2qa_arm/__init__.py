"""Arm's TOSA as a pt2qa quantizer plug-in: what Ethos-U and VGF must compute, on Arm's reference model.

Without ExecuTorch and Arm's tools, the package cannot be imported, and pt2qa lists the plug-in as unavailable, with the
reason.
"""

from __future__ import annotations

from pt2qa_arm.internals import absent_packages

if absent := absent_packages():
    raise ModuleNotFoundError(
        f'{", ".join(absent)} not installed: pip install "pt2qa[arm]"', name=next(iter(absent)).replace("-", "_")
    )

from pt2qa_arm.backend import TOSABackend
from pt2qa_arm.plugin import PLUGIN, TOSA

__all__ = ["PLUGIN", "TOSA", "TOSABackend"]
