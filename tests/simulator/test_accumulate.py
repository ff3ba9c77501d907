"""The loop over batches: how it ends, what it says then, and what the batches of an analysis are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pt2qa
from pt2qa._ranks import NoBatchError, NoNumberError
from pt2qa._report.set_apart import SetApart
from pt2qa._simulator.accumulate import accumulate, empty_batch, first_fault, peeked, refuse_empty
from pt2qa._simulator.batches import (
    as_batch,
    as_call,
    buffers_kept,
    count_samples,
    flatten_batch,
    has_no_element,
    input_names,
    leaf_names,
    leaves_of,
    nbytes_of,
    output_names,
    plain,
    plain_batch,
    structured,
    tensor_outputs,
    written_buffers,
)
from pt2qa._simulator.data import Data
from tests.flows import residual_pair
from tests.models import Counter, KeywordInputs, NestedOutputs, images


@dataclass
class Sum:
    """Adds numbers up; a 0 is Ctrl-C."""

    seen: list[int] = field(default_factory=list)

    @property
    def batches(self) -> int:
        return len(self.seen)

    def add(self, batch: int) -> None:
        if batch == 0:
            raise KeyboardInterrupt
        self.seen.append(batch)


def data(*batches: Any, **options: Any) -> Data:
    return Data("batches", batches, **options)


def test_a_loop_ends_with_the_last_batch_or_says_how_many_it_had() -> None:
    assert accumulate(whole := Sum(), data(1, 2, 3), title="sum", purpose="add") == []
    assert whole.seen == [1, 2, 3]
    notes = [accumulate(Sum(), data(*given), title="sum", purpose="add") for given in ((1, 0, 3), (1, 2, 0))]
    assert notes == [
        ["interrupted: covers the 1 batch that was finished"],
        ["interrupted: covers the 2 batches that were finished"],
    ]
    assert [note[0].kind for note in notes] == ["interrupted"] * 2  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        accumulate(Sum(), data(0, 1), title="sum", purpose="add")
    with pytest.raises(NoBatchError, match=r"no batch to add\. Pass at least one; an iterator that was read before"):
        accumulate(Sum(), data(), title="sum", purpose="add")


def test_the_first_batch_is_looked_at_and_still_there() -> None:
    calls: list[int] = []

    def doubled(item: int) -> int:
        calls.append(item)
        return 2 * item

    first, every = peeked(data(1, 2, 3, inputs_of=doubled), "add")
    assert (first, calls) == (2, [1])
    assert list(every) == [2, 4, 6]
    assert calls == [1, 2, 3]
    with pytest.raises(NoBatchError, match="no batch to add"):
        peeked(data(), "add")


def test_empty_batches_are_counted_and_nothing_but_them_is_refused() -> None:
    assert empty_batch(3) == SetApart(3, 0, -1, "batch", "no samples")
    refuse_empty(3, [empty_batch(0), SetApart(1, 2, 0, "batch", "NaN"), empty_batch(2)])
    with pytest.raises(NoNumberError, match=re.escape("every batch is empty (2 read). Pass batches with samples.")):
        refuse_empty(2, [empty_batch(0), empty_batch(1)])


def test_a_fault_is_found_again_with_all_that_is_known_of_it() -> None:
    simulator, batch = residual_pair().simulator, images()
    assert first_fault(simulator, [batch], 4, 2) is None
    batch[1, 0, 0, 0] = torch.nan
    assert first_fault(simulator, [batch], 4, 2) == SetApart(4, 2, 1, "batch", "NaN", "x", "")


def test_batches_are_an_iterable_of_batches() -> None:
    assert list(data({"x": 1}, (2,), 3)) == [{"x": 1}, (2,), 3]
    for one in (torch.ones(2), np.ones(2), {"x": 1}):
        with pytest.raises(pt2qa.BatchError, match=rf"batches is a single {type(one).__name__}; expected an iterable"):
            list(Data("batches", one))
    with pytest.raises(
        pt2qa.BatchError, match="batches is of type int; expected an iterable of batches, such as a list"
    ):
        list(Data("batches", 3))  # type: ignore[arg-type]
    assert Data("batches", []).positions(None, None).note([1]) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("progress", "disabled"), [(True, False), (False, True)])
def test_a_bar_is_shown_where_it_is_asked_for(progress: bool, disabled: bool) -> None:
    bar = Data("batches", [], progress=progress).bar("title", "row", of=[1, 2])
    assert (bar.disable, list(bar)) == (disabled, [1, 2])
    if not disabled:
        assert (bar.desc, bar.unit, bar.leave, bar.total) == ("title", "row", False, 2)


# -- batches and outputs ---------------------------------------------------------------------------------------------


def keywords() -> torch.fx.GraphModule:
    capture = pt2qa.capture(KeywordInputs().eval(), (torch.ones(4, 16),), {"scale": torch.ones(16)})
    return capture.module()


def test_a_batch_is_a_call_and_back() -> None:
    graph, x, scale = keywords(), torch.ones(4, 16), torch.ones(16, requires_grad=True)
    assert input_names(graph) == ["x", "scale"]
    for batch in ({"x": x, "scale": scale}, {"scale": scale, "x": x}):
        (first,), rest = as_call(batch, graph)
        assert first is x
        assert list(rest) == ["scale"]
        assert not rest["scale"].requires_grad
        assert rest["scale"].data_ptr() == scale.data_ptr()
        assert [each.shape for each in flatten_batch(graph, batch)] == [x.shape, scale.shape]
        assert as_batch((first,), rest, graph) == {"x": first, "scale": rest["scale"]}
    assert as_call((x,), graph) == ((x,), {})
    assert as_call([x], graph) == ((x,), {})
    assert as_call(x, graph) == ((x,), {})
    assert as_batch((x,), {}, graph) == (x,)
    assert as_batch((), {"scale": scale}, graph) == {"scale": scale}
    traced = torch.fx.symbolic_trace(nn.ReLU())
    assert input_names(traced) == ["input_1"]
    assert as_call({"input_1": x}, traced) == ((), {"input_1": x})


def test_samples_and_elements_of_a_batch() -> None:
    assert [count_samples(values) for values in ([torch.ones(()), 3, torch.ones(5, 2), torch.ones(7)], [3], [])] == [
        5,
        1,
        1,
    ]
    assert has_no_element([torch.ones(0, 3), 7, torch.ones(2, 0)])
    assert not has_no_element([torch.ones(0, 3), torch.ones(1)])
    assert not has_no_element([7])
    assert plain_batch((3,)) == (3,)


def test_buffers_that_a_graph_writes_to_get_their_values_back() -> None:
    graph = pt2qa.capture(Counter().eval(), images()).module()
    names = written_buffers(graph)
    assert names == ("calls",)
    with contextlib.suppress(ZeroDivisionError), buffers_kept(graph, names):
        graph(images())
        assert int(graph.get_buffer("calls")) == 1
        raise ZeroDivisionError
    assert int(graph.get_buffer("calls")) == 0
    assert written_buffers(keywords()) == ()


def test_outputs_are_named_and_nested_as_the_model_returns_them() -> None:
    graph = pt2qa.capture(NestedOutputs().eval(), torch.ones(2, 16)).module()
    names = ["output.logits", "output.rest[0]", "output.rest[1]", "output.rest[2]"]
    assert output_names(graph, 4) == names
    assert output_names(graph, 3) == ["output[0]", "output[1]", "output[2]"]
    assert tensor_outputs(graph) == dict(enumerate(names))
    assert structured(graph, (1, 2, 3, 4)) == {"logits": 1, "rest": (2, 3, 4)}
    assert structured(graph, [1]) == 1
    assert structured(graph, [1, 2]) == (1, 2)
    assert leaf_names({"a b": 1}) == ["output.a b"]
    one = torch.ones(3)
    assert leaves_of([one, (None, {"k": (2, one)})])[1] is one
    assert len(leaves_of([one, (None, {"k": (2, one)})])) == 2
    assert nbytes_of([one, {"k": torch.ones(2, dtype=torch.float64)}, 5]) == 12 + 16
    immutable = torch.fx.immutable_collections.immutable_list(
        [1, torch.fx.immutable_collections.immutable_dict(a=(2,))]
    )
    assert plain(immutable) == [1, {"a": [2]}]
    assert type(plain(immutable)) is list


class Sizes(nn.Module):
    """Returns a tensor, a size and nothing."""

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x + 1, x.shape[0], None, x * 2


def test_numbers_and_sizes_are_no_outputs_that_are_compared() -> None:
    shapes = ({0: torch.export.Dim("n", min=2)},)
    graph = torch.export.export(Sizes(), (torch.ones(3, 2),), dynamic_shapes=shapes).module()
    assert tensor_outputs(graph) == {0: "output[0]", 3: "output[3]"}  # type: ignore[arg-type]


def test_batches_are_read_one_after_the_other() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in (1, 2):
            read.append(number)
            yield number

    every = iter(Data("batches", items()))
    assert (next(every), read) == (1, [1])
