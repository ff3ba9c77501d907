"""Tests of one model run in one process, where they share its capture and its pairs: ``--dist loadgroup``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.pairs import MODELS

MAKE_THEIR_OWN = ("test_recomputed", "test_sensitivity")
"""Files whose tests share nothing, so that each may run anywhere."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem not in MAKE_THEIR_OWN:
            model = next((name for name in MODELS if name.partition("_")[0] in item.name), item.path.stem)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(model))
