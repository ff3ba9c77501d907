"""Quantizers from the executorch package on MobileNetV2: one block left in float."""

from __future__ import annotations

import pytest

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa.overrides import annotations_of
from tests.overrides.flows import check_prediction, places
from tests.overrides.strangers import STRANGERS
from tests.zoo.pairs import captured

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.xdist_group("mobilenet_v2"),
    # coremltools and its parts speak about versions of scikit-learn, of torch, and of pkg_resources.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
BLOCK = "features.4.conv"
POSTTRAINING = [name for name, (_, qat) in STRANGERS.items() if not qat]


@pytest.mark.parametrize("stranger", POSTTRAINING)
def test_a_block_in_float_changes_the_sites_that_were_meant(stranger: str) -> None:
    made, (make, _) = captured("mobilenet_v2"), STRANGERS[stranger]
    batch = made.batches[0]
    annotations = annotations_of(made.capture, make())
    edit = Edit("float", tuple(name for name in annotations.ops if name.startswith(BLOCK)))
    before = pt2qa.quantize(made.capture, make(), [batch], progress=False)
    plan = OverridePlan((edit,))
    after = pt2qa.quantize(made.capture, make(), [batch], overrides=plan, progress=False)
    check_prediction(annotations.with_edits([edit]), before, after)
    gone = places(before.sites) - places(after.sites)
    assert {name for kind, name in gone if kind == "weight"} == {name for name in edit.ops if "conv2d" in name}
    read = {edge.source for edge in annotations.edges if edge.reader in edit.ops}
    assert {name for _, name in gone} <= {*edit.ops, *read}
    after.verify(batch)
