"""What each example in a docstring uses without an import."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pt2qa


@pytest.fixture(autouse=True, scope="session")
def names(doctest_namespace: dict[str, Any]) -> None:
    """Both names, in every example."""
    doctest_namespace.update(torch=torch, pt2qa=pt2qa)
