"""What each kind of edit does, and how it says that it cannot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torchao.quantization.pt2e.quantizer.arm_inductor_quantizer import (
    ArmInductorQuantizer,
    get_default_arm_inductor_quantization_config,
)
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import pt2qa
from pt2qa import Edit, OverridePlan, PluginError, QuantizeError, SelectionError
from pt2qa.overrides import Edge, annotations_of
from tests.models import Linears
from tests.overrides.flows import annotated, captured, check_prediction, edited, places, plain
from tests.overrides.nets import NETS


def generic() -> X86InductorQuantizer:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def unknown() -> ArmInductorQuantizer:
    """A quantizer whose kernels no plug-in knows."""
    return ArmInductorQuantizer().set_global(get_default_arm_inductor_quantization_config())


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "quantizer", "edit", "error", "message"),
    [
        ("residual", "xnnpack", Edit("float", ("conv1/conv",)), SelectionError, "'conv1/conv'; did you mean 'conv1/"),
        ("residual", "xnnpack", Edit("float", ("nothing",)), SelectionError, "no op 'nothing'. Reports list"),
        ("residual", "xnnpack", Edit("float", ("bn1/batch_norm",)), SelectionError, "folded into the op before it"),
        ("residual", "x86", Edit("float", ("mean",)), QuantizeError, "changes nothing: x86 annotates nothing there"),
        ("mobile", "xnnpack", Edit("fuse", ("stem.0/conv2d", "fc/linear")), PluginError, "for conv2d \\+ linear"),
        (
            "mobile",
            "xnnpack",
            Edit("fuse", ("stem.0/conv2d", "blocks.0.expand.2/hardtanh")),
            QuantizeError,
            r"hardtanh does not read stem.0/conv2d, which is read by stem.2/hardtanh",
        ),
        ("mobile", "x86", Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh")), PluginError, "that it can fuse: none"),
        ("mobile", "xnnpack", Edit("int16", ("fc/linear",)), PluginError, "fc/linear: XNNPACK has no int16"),
        ("mobile", "x86", Edit("int16", ("fc/linear",)), PluginError, "Inductor has no int16"),
        ("mobile", "x86", Edit("dynamic", ("stem.0/conv2d",)), PluginError, "of linear only"),
        ("mobile", "xnnpack", Edit("dynamic", ("blocks.0.depthwise.0/conv2d",)), PluginError, "no depthwise conv"),
        ("mobile", "xnnpack", Edit("dynamic", ("blocks.0/add",)), PluginError, "blocks.0/add has no weights"),
        ("residual", "xnnpack", Edit("dynamic", ("conv1/conv2d",)), PluginError, "a convolution with a ReLU behind it"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(
    net: str, quantizer: str, edit: Edit, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        annotated(net, quantizer).with_edits([edit])


def test_a_first_op_with_other_readers_is_not_fused() -> None:
    quantizer = annotations_of(captured("two_users")[0], unknown())
    with pytest.raises(QuantizeError, match="add reads the output of conv/conv2d, too"):
        quantizer.with_edits([Edit("fuse", ("conv/conv2d", "relu"))])


def test_a_pair_without_rounding_in_between_is_not_fused() -> None:
    with pytest.raises(QuantizeError, match="changes nothing: the output of conv1/conv2d is not quantized on its way"):
        annotations_of(captured("residual")[0], unknown()).with_edits([Edit("fuse", ("conv1/conv2d", "relu/relu"))])


def test_quantize_says_the_same() -> None:
    capture, batch = captured("residual")
    with pytest.raises(SelectionError, match="the model has no op 'conv9'"):
        edited("residual", "xnnpack", Edit("float", ("conv9",)))
    with pytest.raises(QuantizeError, match=r"overrides: got .*expected an OverridePlan or None"):
        pt2qa.quantize(capture, "xnnpack", [batch], overrides=Edit("float", ("add",)))  # type: ignore[arg-type]


def test_a_plan_that_leaves_nothing_quantized_is_an_error() -> None:
    with pytest.raises(QuantizeError, match="annotated 0 of"):
        edited("linear_twice", "x86", Edit("float", ("fc/linear", "fc/linear_1")))


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_fits_the_model_exported_again(tmp_path: Path) -> None:
    plan = OverridePlan((Edit("float", ("blocks.0.project.0/conv2d",)),), quantizer="xnnpack", model="Mobile")
    plan.save(tmp_path / "plan.json")
    model, batch = NETS["mobile"]()
    larger = tuple(torch.cat([tensor, tensor]) for tensor in batch)
    again = pt2qa.capture(model, larger, strict=True)
    loaded = OverridePlan.load(tmp_path / "plan.json")
    pair = pt2qa.quantize(again, "xnnpack", [larger], overrides=loaded, progress=False)
    assert places(pair.sites) == places(edited("mobile", "xnnpack", *plan.edits).sites)
    assert pair.notes == ("overrides: 1 float",)


def test_a_plan_for_another_quantizer_is_applied_with_a_note() -> None:
    capture, batch = captured("residual")
    plan = OverridePlan((Edit("float", ("fc/linear",)),), quantizer="xnnpack")
    pair = pt2qa.quantize(capture, "x86", [batch], overrides=plan, progress=False)
    # x86 finds other ops in a plain export of this model, which is noted before.
    assert pair.notes[-2:] == ("overrides: 1 float", "the overrides were made for xnnpack, and are applied to x86")
    assert all("plain torch.export" in note for note in pair.notes[:-2])
    check_prediction(annotated("residual", "x86").with_edits(plan.edits), plain("residual", "x86"), pair)


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_fusing_gives_the_second_op_the_spec_of_the_first() -> None:
    """With a quantizer that annotates the first op alone."""
    before = annotated("mobile", "xnnpack")
    alone = before.with_edits([Edit("float", ("stem.2/hardtanh",))])
    after = alone.with_edits([Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh"))])
    spec = next(edge.spec for edge in before.edges if edge.source == "stem.0/conv2d")
    assert Edge("stem.2/hardtanh", "", "activation", spec) in after.edges
    assert not [edge for edge in after.edges if edge.source == "stem.0/conv2d"]


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_dynamic_linear_finds_its_scale_in_each_batch(quantizer: str) -> None:
    edit = Edit("dynamic", ("fc/linear",))
    pair = edited("mobile", quantizer, edit)
    batch = captured("mobile")[1]
    pair.verify(batch)
    read = [site for site in pair.sites if "fc/linear" in site.readers and site.kind == "activation"]
    assert [site.params.dynamic for site in read] == [True]
    assert not [site for site in pair.sites if site.name == "fc/linear" and site.kind == "activation"]
    weight = [site for site in pair.sites if site.name == "fc/linear" and site.kind == "weight"]
    assert [site.params.dtype for site in weight] == ["int8"]


def test_a_dynamic_region_leaves_its_activation_in_float() -> None:
    capture = pt2qa.capture(Linears().eval(), torch.ones(2, 16))
    after = annotations_of(capture, "xnnpack", [Edit("dynamic", ("first/linear", "relu"))])
    assert {edge.spec for edge in after.edges if edge.reader == "first/linear" and edge.kind == "activation"} == {
        "int8 per_tensor_affine -128..127 dynamic Placeholder"
    }
    assert {edge.reader for edge in after.edges if edge.source == "relu"} == {"second/linear"}


@pytest.mark.parametrize(("observer", "name"), [("minmax", "MinMax"), ("moving_average", "MovingAverageMinMax")])
def test_another_observer_is_for_the_values_an_op_reads_and_makes(observer: str, name: str) -> None:
    edit = Edit("observer", ("conv2/conv2d", "bn2/batch_norm"), observer)
    after = annotated("residual", "xnnpack").with_edits([edit])
    changed = {edge.source for edge in after.edges if edge.spec.endswith(f" {name}") and edge.kind == "activation"}
    assert changed == {"relu/relu", "conv2/conv2d"}
    assert after.edges == annotations_of(captured("residual")[0], "xnnpack", [edit]).edges


def test_minmax_takes_in_the_whole_range() -> None:
    pair = edited("residual", "xnnpack", Edit("observer", ("conv1/conv2d",), "minmax"))
    (batch,) = captured("residual")[1]
    site = next(site for site in pair.sites if site.name == "x")
    low, high = min(float(batch.min()), 0.0), max(float(batch.max()), 0.0)
    assert site.params.scale == pytest.approx((high - low) / 255, rel=1e-5)


def test_an_observer_that_is_there_already_changes_nothing() -> None:
    with pytest.raises(QuantizeError, match="changes nothing"):
        annotated("residual", "xnnpack").with_edits([Edit("observer", ("conv1/conv2d",), "histogram")])


def test_int16_activations_with_a_quantizer_that_says_nothing_about_them() -> None:
    edit = Edit("int16", ("conv1/conv2d", "conv2/conv2d", "fc/linear"))
    pair = edited("residual", generic(), edit)
    (batch,) = captured("residual")[1]
    pair.verify(batch)
    dtypes = {site.name: site.params.dtype for site in pair.sites if site.kind == "activation"}
    assert dtypes["x"] == dtypes["mean"] == "int16"
    finer = pair.quantized(batch) - pair.reference(batch)
    coarser = plain("residual", "x86").quantized(batch) - plain("residual", "x86").reference(batch)
    assert finer.norm() < coarser.norm()


# -- quantization-aware training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_region_left_in_float_in_training(quantizer: str) -> None:
    """The batch norm stays in the graph then, and what it gives is called after it."""
    edit = Edit("float", ("conv2/conv2d", "bn2/batch_norm"))
    pair = edited("residual", quantizer, edit, qat=True)
    before = plain("residual", quantizer, qat=True)
    annotations = annotated("residual", quantizer, qat=True)
    assert annotations.sites_on(before.sites) == set(range(len(before.sites)))
    stays = places(before.sites[index] for index in annotations.with_edits([edit]).sites_on(before.sites))
    folded = {"bn2/batch_norm": "conv2/conv2d"}
    assert stays == Counter(
        {(kind, folded.get(name, name)): count for (kind, name), count in places(pair.sites).items()}
    )
    assert ("weight", "conv2/conv2d") not in stays
    pair.verify(captured("residual")[1])


def test_training_brings_its_own_observers() -> None:
    with pytest.raises(QuantizeError, match="with qat=True only 'float' and 'fuse' edits are possible"):
        annotated("residual", "xnnpack", qat=True).with_edits([Edit("observer", ("fc/linear",), "minmax")])


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_a_plain_quantizer_object_takes_edits() -> None:
    pair = edited("residual", generic(), Edit("float", ("conv2/conv2d", "add")))
    predicted = annotated("residual", "x86").with_edits([Edit("float", ("conv2/conv2d", "add"))])
    check_prediction(predicted, plain("residual", "x86"), pair)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_fixed_range_is_that_of_all_that_share_it(quantizer: str) -> None:
    before = plain("pooled", quantizer)
    groups = annotated("pooled", quantizer).groups
    at = annotated("pooled", quantizer).points_at(before.sites)
    [cat] = [site for site in before.sites if site.name == "cat" and site.kind == "activation"]
    shared = {index for index, points in at.items() if {groups[point] for point in points} & {groups[at[cat.index][0]]}}
    after = edited("pooled", quantizer, Edit("range", ("cat",), scale=0.3, zero_point=5))
    assert len(shared) > 1
    assert places(after.sites) == places(before.sites)
    for old, new in zip(before.sites, after.sites, strict=True):
        fixed = (new.params.scale, new.params.zero_point) == (pytest.approx(0.3), 5)
        assert fixed == (old.index in shared)
    assert annotated("pooled", quantizer).after(Edit("range", ("cat",), scale=0.3, zero_point=999)) is None


def test_the_range_of_an_input_can_be_fixed() -> None:
    after = edited("residual", "xnnpack", Edit("range", ("x",), scale=0.125, zero_point=-7))
    [site] = [site for site in after.sites if site.name == "x"]
    assert (site.params.scale, site.params.zero_point) == (0.125, -7)
    with pytest.raises(QuantizeError, match="changes nothing"):
        edited("residual", "xnnpack", Edit("range", ("conv1/conv2d",), scale=0.1))
