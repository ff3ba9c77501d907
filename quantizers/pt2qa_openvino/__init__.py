"""OpenVINO as a pt2qa backend: its CPU kernels run what any quantizer converted."""

from __future__ import annotations

from pt2qa_openvino.backend import BACKEND, OpenVINOBackend

__all__ = ["BACKEND", "OpenVINOBackend"]
