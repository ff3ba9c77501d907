"""What each example in a docstring uses without an import."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import pt2qa

# These import ONNX Runtime, which `make runtimes` installs.
collect_ignore = (
    [] if find_spec("onnxruntime") else [f"quantizers/pt2qa_onnxruntime/{name}.py" for name in ("kernels", "lowering")]
)


@pytest.fixture(autouse=True, scope="session")
def names(doctest_namespace: dict[str, Any]) -> None:
    """Both names, in every example."""
    doctest_namespace.update(torch=torch, pt2qa=pt2qa)
