"""What holds for every test: the same random numbers in each, and no chatter from third parties."""

from __future__ import annotations

import logging
import sys

import pytest

# On import these log which optional libraries of other platforms they did not find.
for _name in ("torch", "torchao", "executorch"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Looked up, not imported: the tests of reports take a second, and without torch they stay that fast.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
