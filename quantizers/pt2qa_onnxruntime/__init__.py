"""ONNX Runtime as a pt2qa backend: it runs what any quantizer converted, exported by torch.onnx."""

from __future__ import annotations

from pt2qa_onnxruntime.backend import BACKEND, ONNXRuntimeBackend

__all__ = ["BACKEND", "ONNXRuntimeBackend"]
