"""Quantizers that the normal environment has, on a few nets; ``make strangers`` runs all of them on all."""

from __future__ import annotations

import pytest

from tests.strangers.campaign import NETS, attempt
from tests.strangers.quantizers import STRANGERS

pytestmark = [
    # executorch's parts speak about versions of others.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize(
    ("name", "net", "outcome"),
    [
        ("Embedding", "embedding", "both"),
        ("Embedding", "linear", "nothing"),
        ("Cadence, WithSoftmax", "avg_pool", "both"),
        ("Samsung", "conv_relu6", "both"),
        ("Vulkan, dynamic", "linear", "both"),
    ],
)
def test_where_plain_torchao_works_pt2qa_does(name: str, net: str, outcome: str) -> None:
    found = attempt(name, STRANGERS[name], net)
    assert (found.outcome, found.step, found.why) == (outcome, "", "")


def test_there_are_ten_nets_and_every_name_is_made_by_something() -> None:
    assert len(set(NETS)) == 10
    assert all(callable(stranger.make) for stranger in STRANGERS.values())
