"""What each example in a docstring uses without an import."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import pt2qa

# Modules of these plug-ins import the runtime itself, which `make runtimes` installs.
collect_ignore = [
    f"quantizers/pt2qa_{runtime}/{name}.py"
    for runtime in ("onnxruntime", "openvino")
    if find_spec(runtime) is None
    for name in ("encodings", "kernels", "lowering")
]
# This one cannot be imported at all without its packages.
collect_ignore += ["quantizers/pt2qa_arm"] if find_spec("tosa_reference_model") is None else []


@pytest.fixture(autouse=True, scope="session")
def names(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Both packages, and a model captured and quantized: the reference shows these lines above the examples."""
    doctest_namespace.update(torch=torch, pt2qa=pt2qa)
    if any(isinstance(item, pytest.DoctestItem) for item in request.session.items):
        made = runpy.run_path(str(Path(__file__).parent / "docs" / "site" / "example.py"))
        doctest_namespace.update({name: made[name] for name in ("x", "capture", "pair")})
