"""What is annotated after an edit, worked out without a graph, is what prepare then quantizes."""

from __future__ import annotations

import copy
import functools

import pytest
from torch.fx import GraphModule

from pt2qa import Edit
from pt2qa._graph.internals.nodes import ANNOTATION
from pt2qa.overrides import Edge, annotations_of, fusions
from pt2qa.overrides.annotations import read_annotations
from pt2qa.overrides.edited import annotate
from pt2qa.overrides.points import Shares, root_of, write_specs
from pt2qa.plugins import resolve
from tests.overrides.flows import annotated, captured, check_prediction, edited, plain
from tests.overrides.nets import NETS

QUANTIZERS = ("xnnpack", "x86")
INT8 = "int8 per_tensor_affine -128..127 Histogram"
WEIGHT = "int8 per_channel_symmetric -127..127 PerChannelMinMax"

EDITS = [
    ("residual", "xnnpack", Edit("float", ("conv1/conv2d", "bn1/batch_norm", "relu/relu"))),
    ("residual", "xnnpack", Edit("float", ("relu/relu_1",))),  # the mean behind it still asks for its value
    ("residual", "x86", Edit("float", ("conv2/conv2d", "bn2/batch_norm", "add", "relu/relu_1"))),
    ("mobile", "xnnpack", Edit("float", ("blocks.0.project.0/conv2d", "blocks.0.project.1/batch_norm"))),
    ("mobile", "xnnpack", Edit("fuse", ("blocks.1.depthwise.0/conv2d", "blocks.1.depthwise.2/hardtanh"))),
    ("mobile", "xnnpack", Edit("float", ("mean",))),
    ("mobile", "x86", Edit("float", ("stem.0/conv2d", "stem.2/hardtanh"))),
    ("pooled", "xnnpack", Edit("float", ("left/conv2d",))),  # both pools share its scale
    ("pooled", "xnnpack", Edit("float", ("max_pool2d",))),  # stands between two that share
    ("pooled", "xnnpack", Edit("float", ("cat",))),
    ("pooled", "x86", Edit("float", ("max_pool2d_1",))),
    ("two_users", "xnnpack", Edit("float", ("conv/conv2d",))),
    ("two_users", "xnnpack", Edit("float", ("add",))),  # an activation alone
    ("same_input_twice", "x86", Edit("float", ("cat",))),
    ("conv_twice", "x86", Edit("float", ("conv/conv2d_1",))),  # one call of a shared module
    ("linear_twice", "xnnpack", Edit("float", ("fc/linear",))),
    ("shared_norm", "x86", Edit("float", ("conv/conv2d", "bn1/batch_norm"))),
]


@functools.cache
def annotated_graph(net: str, quantizer: str) -> GraphModule:
    capture, _ = captured(net)
    return annotate(copy.deepcopy(capture.module()), resolve(quantizer), (), capture.names, qat=False)


def test_edges_say_who_asks_for_what() -> None:
    edges = annotated("residual", "xnnpack").edges
    assert Edge("x", "conv1/conv2d", "activation", INT8) in edges
    assert Edge("relu/relu", "", "activation", INT8) in edges
    assert Edge("conv1.weight", "conv1/conv2d", "weight", WEIGHT) in edges
    assert {edge.spec for edge in edges if edge.source == "mean"} == {INT8}  # it shares the scale of its input
    assert not [edge for edge in edges if edge.kind == "bias"]  # the quantizer asks for float ones


def test_ops_say_which_edits_they_can_take() -> None:
    ops = annotated("mobile", "xnnpack").ops
    assert ops["stem.0/conv2d"].levels == ("float", "dynamic", "observer")
    assert ops["blocks.0.depthwise.0/conv2d"].levels == ("float", "observer")
    assert ops["blocks.0/add"].levels == ("float", "observer")
    assert annotated("mobile", "x86").ops["fc/linear"].levels == ("float", "dynamic", "observer")
    assert annotated("mobile", "x86").ops["stem.0/conv2d"].levels == ("float", "observer")


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", NETS)
def test_every_site_has_an_edge(net: str, quantizer: str) -> None:
    if (net, quantizer) in {("same_input_twice", "xnnpack"), ("shared_norm", "xnnpack")}:
        pytest.skip("like another net")
    sites = plain(net, quantizer).sites
    assert annotated(net, quantizer).sites_on(sites) == set(range(len(sites)))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", NETS)
def test_a_graph_holds_what_was_worked_out_for_each_op_left_in_float(net: str, quantizer: str) -> None:
    capture, _ = captured(net)
    before = annotated(net, quantizer)
    for name, op in before.ops.items():
        if "float" not in op.levels:
            continue
        after = before.with_edits([Edit("float", (name,))])
        graph = annotated_graph(net, quantizer)
        kept = {node: node.meta[ANNOTATION] for node in graph.graph.nodes if ANNOTATION in node.meta}
        write_specs(graph, before.specs, after.specs)
        read = read_annotations(graph, resolve(quantizer), capture.names, qat=False)
        for node, annotation in kept.items():
            node.meta[ANNOTATION] = annotation
        assert read.edges == after.edges
        assert read.edges < before.edges
        order = list(read.specs)
        for point, spec in read.specs.items():
            assert root_of(read.specs, point) is not None
            assert not isinstance(spec, Shares) or order.index(spec.point) < order.index(point)


@pytest.mark.parametrize(("net", "quantizer", "edit"), EDITS, ids=lambda value: str(value).replace("/", "."))
def test_exactly_the_sites_that_were_meant_change(net: str, quantizer: str, edit: Edit) -> None:
    predicted = annotated(net, quantizer).with_edits([edit])
    after = edited(net, quantizer, edit)
    check_prediction(predicted, plain(net, quantizer), after)
    assert predicted.edges < annotated(net, quantizer).edges
    after.verify(captured(net)[1])


@pytest.mark.parametrize(("net", "quantizer", "edit"), EDITS[3:7], ids=str)
def test_the_quantizer_that_edits_gives_the_annotation_that_was_worked_out(
    net: str, quantizer: str, edit: Edit
) -> None:
    assert (
        annotations_of(captured(net)[0], quantizer, [edit]).edges == annotated(net, quantizer).with_edits([edit]).edges
    )


@pytest.mark.parametrize(("net", "quantizer", "edit"), EDITS[2:7], ids=str)
def test_a_pair_keeps_what_was_annotated(net: str, quantizer: str, edit: Edit) -> None:
    for edits in ((), (edit,)):
        recipe = edited(net, quantizer, *edits).recipe
        assert recipe is not None
        assert recipe.annotations == annotations_of(captured(net)[0], recipe.plugin, edits)


def test_a_pair_keeps_what_was_annotated_for_training() -> None:
    recipe = plain("residual", "x86", qat=True).recipe
    assert recipe is not None
    assert recipe.annotations == annotated("residual", "x86", qat=True)


def test_edits_add_up() -> None:
    before = annotated("residual", "xnnpack")
    one, two = Edit("float", ("conv2/conv2d",)), Edit("float", ("fc/linear",))
    assert before.with_edits([one]).with_edits([two]).edges == before.with_edits([one, two]).edges
    assert before.with_edits([one, two]).edges == before.with_edits([one]).edges & before.with_edits([two]).edges


def test_the_first_pool_takes_over_the_scale_of_a_convolution_that_stays_in_float() -> None:
    after = annotated("pooled", "xnnpack").with_edits([Edit("float", ("left/conv2d",))])
    assert Edge("left/conv2d", "max_pool2d", "activation", INT8) in after.edges
    assert Edge("left/conv2d", "", "activation", INT8) not in after.edges
    pair = edited("pooled", "xnnpack", Edit("float", ("left/conv2d",)))
    scale = {site.name: site.params.scale for site in pair.sites if site.kind == "activation"}
    assert scale["left/conv2d"] == scale["max_pool2d"] == scale["max_pool2d_1"]


def test_fusions_are_those_of_the_backend() -> None:
    capture, _ = captured("mobile")
    found = fusions(capture, "xnnpack")
    assert found[0] == Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh"))
    assert len(found) == 5
    assert fusions(capture, "x86") == ()
    assert fusions(captured("residual")[0], "xnnpack") == ()


def test_all_fusions_together_leave_one_site_a_pair() -> None:
    edits = fusions(captured("mobile")[0], "xnnpack")
    pair = edited("mobile", "xnnpack", *edits)
    names = {site.name for site in pair.sites if site.kind == "activation"}
    assert not {edit.ops[0] for edit in edits} & names
    assert {edit.ops[1] for edit in edits} <= names
    check_prediction(annotated("mobile", "xnnpack").with_edits(edits), plain("mobile", "xnnpack"), pair)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_working_out_an_edit_takes_milliseconds(quantizer: str) -> None:
    """A search does it hundreds of times."""
    import time

    before = annotated("mobile", quantizer)
    edit = Edit("float", ("fc/linear",))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        len(before.with_edits([edit]).edges)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02
