"""What each example in a docstring uses without an import."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import pt2qa

# Modules of these plug-ins import the runtime itself, which `make runtimes` installs.
collect_ignore = [
    f"quantizers/pt2qa_{runtime}/{name}.py"
    for runtime in ("onnxruntime", "openvino")
    if find_spec(runtime) is None
    for name in ("kernels", "lowering")
]


@pytest.fixture(autouse=True, scope="session")
def names(doctest_namespace: dict[str, Any]) -> None:
    """Both names, in every example."""
    doctest_namespace.update(torch=torch, pt2qa=pt2qa)
