"""ONNX Runtime as a pt2qa backend: it runs what any quantizer converted, exported by torch.onnx."""

from __future__ import annotations

from typing import Any

from pt2qa_onnxruntime.backend import BACKEND, ONNXRuntimeBackend

__all__ = ["BACKEND", "Encodings", "ONNXRuntimeBackend", "write_encodings"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pt2qa_onnxruntime import encodings  # it needs onnx

        return getattr(encodings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
