"""Where a mask applies: each layout element by element, and the layouts of graphs that are written by hand."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import pt2qa
from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED
from pt2qa._simulator.data import LEADING, Axes, Inside, Layout, without_axes
from tests.padded_prompts import padded, prompts

ATEN = torch.ops.aten
KEEP = torch.tensor([[True, True, False], [True, False, False]])
"""Two samples, three positions."""

LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "leading": (LEADING, (2, 3, 4)),
    "features between": (Layout(0, (2,)), (2, 4, 3)),
    "positions first": (Layout(1, (0,)), (3, 2, 4)),
    "nothing else": (LEADING, (2, 3)),
    "scores": (Layout(0, (2, 3)), (2, 4, 3, 3)),
    "scores alone": (Layout(0, (1, 2)), (2, 3, 3)),
    "heads in the batch": (Layout(0, (1,), repeats=2), (4, 3, 5)),
    "scores with heads in the batch": (Layout(0, (1, 2), repeats=2), (4, 3, 3)),
    "merged": (Layout(None, (0,), merged="samples first"), (6, 4)),
    "merged, positions first": (Layout(None, (1,), merged="positions first"), (4, 6, 2)),
    "one sample": (Layout(None, (1,)), (4, 3)),
    "scores of one sample": (Layout(None, (1, 2)), (4, 3, 3)),
}


def counts(layout: Layout, index: tuple[int, ...], keep: Tensor) -> bool:
    """Whether one element counts."""
    samples, positions = keep.shape
    if layout.merged == "samples first":
        return bool(keep[divmod(index[layout.tokens[0]], positions)])
    if layout.merged == "positions first":
        return bool(keep[divmod(index[layout.tokens[0]], samples)[::-1]])
    sample = 0 if layout.batch is None else index[layout.batch] // layout.repeats
    return all(bool(keep[sample, index[axis]]) for axis in layout.tokens)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_counts_or_does_not(name: str) -> None:
    layout, shape = LAYOUTS[name]
    keep = KEEP[:1] if layout.batch is None and not layout.merged else KEEP
    value = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1
    before = value.clone()
    axes = [*([] if layout.batch is None else [layout.batch]), *layout.tokens]
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    kept: dict[tuple[int, ...], list[int]] = {}
    for index in itertools.product(*(range(shape[axis]) for axis in (*axes, *rest))):
        place = tuple(index[[*axes, *rest].index(axis)] for axis in range(len(shape)))
        if counts(layout, place, keep):
            kept.setdefault(index[len(axes) :], []).append(int(value[place]))
    assert layout.counted(value, keep).shape == (len(kept[(0,) * len(rest)]), *(shape[axis] for axis in rest))
    zeroed, filled = layout.zeroed(value, keep), layout.filled(value, keep)
    for others, own in kept.items():
        assert layout.counted(value, keep)[(slice(None), *others)].tolist() == own
    for place in itertools.product(*map(range, shape)):
        others = tuple(place[axis] for axis in rest)
        inside = counts(layout, place, keep)
        assert int(zeroed[place]) == (int(value[place]) if inside else 0)
        assert int(filled[place]) == (int(value[place]) if inside else kept[others][0])
    assert torch.equal(value, before)
    found = [layout.axis_of_counted(axis, len(shape)) for axis in range(len(shape))]
    assert found == [rest.index(axis) + 1 if axis in rest else None for axis in range(len(shape))]


def test_values_of_unknown_axes_stay_as_they_are() -> None:
    inside = Inside(KEEP, {"a": LEADING})
    value = torch.arange(6.0).reshape(2, 3)
    assert inside.of("a", value).tolist() == [0, 1, 3]
    assert inside.zeroed("a", value).tolist() == [[0, 1, 0], [3, 0, 0]]
    assert inside.filled("a", value).tolist() == [[0, 1, 0], [3, 0, 0]]
    assert (inside.axis("a", 2, 3), inside.axis("a", 1, 3), inside.axis("b", 1, 3)) == (1, None, 1)
    for change in (inside.of, inside.zeroed, inside.filled):
        assert change("b", value) is value
    assert inside.of("a", 7) == 7
    assert without_axes([], 3) == []
    assert without_axes(["x", "y"], 5, "rows") == [
        "mask: not applied to 2 of 5 rows, whose sample and position axes are unknown: x, y"
    ]


# -- graphs ----------------------------------------------------------------------------------------------------------


def graph_of(samples: int, positions: int, *shapes: tuple[int, ...], weight: tuple[int, ...], op: Any) -> GraphModule:
    """A graph of fixed sizes: an embedding or linear with this weight, then a chain of values of these shapes."""
    graph = Graph()
    graph.placeholder("scale").meta["val"] = 1.0
    ids = graph.placeholder("ids")
    ids.meta["val"] = torch.ones(samples, positions)
    read = graph.get_attr("weight")
    read.meta["val"] = torch.ones(weight)
    last = graph.call_function(op, (read, ids))
    last.meta["val"] = torch.ones(7)
    last = ids
    for number, shape in enumerate(shapes):
        last = graph.create_node("call_function", ATEN.relu.default, (last,), name=f"v{number}")
        last.meta["val"] = torch.ones(shape)
    graph.output(last)
    return GraphModule({"weight": torch.ones(weight)}, graph)


def layouts(samples: int, positions: int, *shapes: tuple[int, ...], weight: Any = (4, 4), op: Any = ATEN.linear) -> Any:
    """Of the input, and of each value of such a graph."""
    graph = graph_of(samples, positions, *shapes, weight=weight, op=op.default)
    keep = torch.ones(samples, positions, dtype=torch.bool)
    found = Axes(graph, lambda batch: keep).of({}, [1.0, torch.ones(samples, positions)]).layouts
    assert found.keys() <= {"ids", *(f"v{number}" for number in range(len(shapes)))}
    return [found.get(name) for name in ("ids", *(f"v{number}" for number in range(len(shapes))))]


def test_axes_of_a_graph_of_fixed_sizes() -> None:
    assert layouts(2, 5, (2, 5, 4), (2, 4, 5), (2, 3, 5, 5), (4, 5), (2, 4), (10, 4), (1, 10)) == [
        LEADING,
        LEADING,
        Layout(0, (2,)),
        Layout(0, (2, 3)),
        None,  # the first axis is none of samples
        None,
        None,  # read from a value of unknown axes
        None,
    ]
    assert layouts(2, 5, (2, 5, 4), (10, 4), (10, 3), (4, 10), (10, 10)) == [
        LEADING,
        LEADING,
        Layout(None, (0,), merged="samples first"),
        Layout(None, (0,), merged="samples first"),
        Layout(None, (1,), merged="samples first"),
        None,
    ]
    assert layouts(1, 5, (5, 4), (1, 4, 5), (4,)) == [Layout(None, (1,)), Layout(None, (0,)), Layout(None, (2,)), None]


@pytest.mark.parametrize(
    ("samples", "weight", "op"),
    [(2, (8, 3), ATEN.linear), (2, (3, 16), ATEN.linear), (8, (3, 3), ATEN.linear), (2, (30, 8), ATEN.embedding)],
    ids=["size of features", "multiple of it", "number of samples", "size of words"],
)
def test_where_features_may_have_the_size_of_positions_only_leading_axes_count(
    samples: int, weight: tuple[int, ...], op: Any
) -> None:
    shapes = (samples, 8, 3), (samples, 3, 8), (samples, 8), (samples, 8, 8), (8,)
    assert layouts(samples, 8, *shapes, weight=weight, op=op) == [LEADING, LEADING, None, None, None, None]


def test_what_is_made_of_constants_alone_has_no_features() -> None:
    graph = graph_of(2, 8, weight=(8, 3), op=ATEN.linear.default)
    weight, output = graph.graph.find_nodes(op="get_attr")[0], graph.graph.output_node()
    with graph.graph.inserting_before(output):
        table = graph.graph.create_node("call_function", ATEN.neg.default, (weight,), name="table")
    table.meta["val"] = torch.ones(2, 8)
    found = Axes(graph, lambda batch: torch.ones(2, 8).bool()).of({}, [1.0, torch.ones(2, 8)]).layouts
    assert found == {"ids": LEADING, "table": LEADING}


def test_the_number_of_words_and_other_constants_are_no_features() -> None:
    shapes = (2, 8, 3), (2, 3, 8)
    assert layouts(2, 8, *shapes, weight=(8, 3), op=ATEN.embedding) == [LEADING, LEADING, Layout(0, (2,))]
    assert layouts(2, 8, *shapes, weight=(8, 8), op=ATEN.mul) == [LEADING, LEADING, Layout(0, (2,))]


def test_rounding_keeps_axes_and_constants_have_none() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 5, 4)
    table = graph.get_attr("table")
    table.meta["val"] = torch.ones(2, 5, 4)
    rounded = graph.call_function(QUANTIZED_DECOMPOSED.quantize_per_tensor.default, (x, 0.1, 0, -128, 127, torch.int8))
    total = graph.call_function(ATEN.add.Tensor, (rounded, table))
    total.meta["val"] = torch.ones(2, 5, 4)
    graph.output(total)
    module = GraphModule({"table": torch.ones(2, 5, 4)}, graph)
    found = Axes(module, lambda batch: torch.ones(2, 5).bool()).of({}, [torch.ones(2, 5, 4)]).layouts
    assert found == {node.name: LEADING for node in (x, rounded, total)}


class Folding(nn.Module):
    """Values whose axes are those of samples and positions in many orders."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        samples, positions = input_ids.shape
        x = self.words(input_ids)
        turned = x.transpose(0, 1)
        heads = x.view(samples, positions, 2, 2).transpose(1, 2)
        folded = heads.reshape(2 * samples, positions, 2)
        return {
            "words": x,
            "turned": turned,
            "rows": x.reshape(samples * positions, 4),
            "turned rows": turned.reshape(samples * positions, 4).relu(),
            "folded": folded,
            "scores": folded @ folded.transpose(1, 2),
            "turned heads": heads.transpose(0, 1).reshape(2 * samples, positions, 2),
            "twice": torch.cat([x, x]),
            "repeated": x.repeat_interleave(2, 0),
            "pooled": x.sum(1),
            "mean": x.mean(0),
            "pairs": x.sum(1) @ x.sum(1).T,
        }


FOLDED: dict[str, Layout | None] = {
    "words": LEADING,
    "turned": Layout(1, (0,)),
    "rows": Layout(None, (0,), merged="samples first"),
    "turned rows": Layout(None, (0,), merged="positions first"),
    "folded": Layout(0, (1,), repeats=2),
    "scores": Layout(0, (1, 2), repeats=2),
    "turned heads": None,
    "twice": None,  # all samples, and all once more
    "repeated": Layout(0, (1,), repeats=2),
    "pooled": None,
    "mean": None,
    "pairs": None,
}


@functools.cache
def folding() -> GraphModule:
    axes = {0: torch.export.Dim("prompts", min=2, max=64), 1: torch.export.Dim("tokens", min=2, max=64)}
    shapes = {"input_ids": axes, "attention_mask": axes}
    return pt2qa.capture(Folding().eval(), (), padded(prompts()), dynamic_shapes=shapes).module()


def test_axes_of_a_graph_of_symbolic_sizes() -> None:
    graph, batch = folding(), padded(prompts())
    inside = Axes(graph, "attention_mask").of(batch, list(batch.values()))
    outputs = graph.graph.output_node().args[0]
    assert {name: inside.layouts.get(node.name) for name, node in zip(FOLDED, outputs, strict=True)} == FOLDED
    # Words of the prompts, and nothing else, are in what counts.
    with torch.no_grad():
        values = graph(**batch)
    words = graph.get_parameter("words.weight").detach()[torch.cat(prompts())]
    for name, node in zip(FOLDED, outputs, strict=True):
        if name in ("words", "rows"):
            assert torch.equal(inside.of(node.name, values[name]), words)
        if name == "turned rows":
            assert inside.of(node.name, values[name]).sum() == pytest.approx(float(words.relu().sum()), rel=1e-5)


# -- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "batch"),
    [
        ("attention_mask", padded(prompts())),
        ("attention_mask", tuple(padded(prompts()).values())),
        (lambda batch: batch["attention_mask"].bool(), padded(prompts())),
    ],
    ids=["dict", "tuple", "function"],
)
def test_a_mask_is_an_input_or_what_a_function_makes_of_a_batch(mask: Any, batch: Any) -> None:
    axes = Axes(folding(), mask)
    values = list(padded(prompts()).values())
    inside = axes.of(batch, values)
    assert inside.keep.dtype == torch.bool
    assert torch.equal(inside.keep, values[1].bool())
    assert axes.settings["mask"] == (mask if isinstance(mask, str) else "<lambda>")


ONES = torch.ones(4, 13, dtype=torch.int64)
REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([1], r"mask is list; expected a bool tensor of shape \(samples, positions\)"),
    "another rank": (ONES[0], r"mask is a tensor of shape \(13,\); expected a bool tensor"),
    "floats": (ONES.float(), r"mask has float32 values other than integers 0 and 1; expected True or 1"),
    "other integers": (ONES * 2, r"mask has int64 values other than integers 0 and 1"),
    "zero": (ONES * 0, r"mask is zero at every position of a batch. Leave that batch out"),
    "another shape": (
        ONES[:3],
        r"mask has the shape \(3, 13\); expected \(samples, positions\), the first two axes of an input, whose shapes "
        r"begin with \[\(4, 13\), \(4, 13\)\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mask_that_does_not_fit_is_refused(name: str) -> None:
    mask, message = REFUSED[name]
    with pytest.raises(pt2qa.BatchError, match=message):
        Axes(folding(), lambda batch: mask).of({}, list(padded(prompts()).values()))


def test_a_later_mask_of_another_shape_is_refused() -> None:
    axes = Axes(folding(), lambda batch: batch)
    values = list(padded(prompts()).values())
    axes.of(ONES, [7, values[0], 3.5])
    assert axes.layouts is not None
    axes.of(ONES[:2], [7, values[0][:2], 3.5])
    with pytest.raises(
        pt2qa.BatchError,
        match=r"mask has the shape \(3, 13\); expected \(4, 13\), the first two axes of the input 'attention_mask'",
    ):
        axes.of(ONES[:3], [7, values[0], 3.5])
    with pytest.raises(pt2qa.SelectionError, match=r"no input 'mask'; it has input_ids, attention_mask\. Name one"):
        Axes(folding(), "mask")


def test_a_graph_that_records_no_shapes_is_refused() -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(pt2qa.SelectionError, match="the graph does not record the shapes of its inputs"):
        Axes(graph, lambda batch: ONES).of({}, [ONES])
    vector = graph_of(2, 3, weight=(4, 4), op=ATEN.linear.default)
    vector.graph.find_nodes(op="placeholder")[1].meta["val"] = torch.ones(2)
    with pytest.raises(pt2qa.SelectionError, match="the graph does not record the shapes"):
        Axes(vector, lambda batch: torch.ones(2, 3).bool()).of({}, [1.0, torch.ones(2, 3)])
