"""Graphs that change after they were paired: every analysis describes what they are when it is called."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import pt2qa
from pt2qa._ambient import torch_defaults
from pt2qa._simulator.contents import Contents, checksum
from tests.analyses import ANALYSES, batches, model


def quantized(net: nn.Module) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(net, batches()[0]), "xnnpack", batches(), progress=False)


@functools.cache
def once() -> pt2qa.QuantizedPair:
    return quantized(model())


@functools.cache
def trained() -> dict[str, Tensor]:
    """The state of a converted graph with other weights."""
    net = model()
    with torch.no_grad():
        net.fc.weight.mul_(torch.linspace(0.5, 2.0, 32).unsqueeze(1))  # type: ignore[union-attr]
        net.conv.weight.add_(0.1)  # type: ignore[union-attr, operator]
    return quantized(net).quantized.state_dict()


def weight_of(pair: pt2qa.QuantizedPair) -> Tensor:
    """The integers of a weight."""
    return next(each for each in pair.quantized.state_dict().values() if each.dtype == torch.int8)


def load(pair: pt2qa.QuantizedPair) -> None:
    pair.quantized.load_state_dict(trained())


def assign(pair: pt2qa.QuantizedPair) -> None:
    pair.quantized.load_state_dict(trained(), assign=True)


def write_in_place(pair: pt2qa.QuantizedPair) -> None:
    weight_of(pair).copy_(-weight_of(pair))


def write_data(pair: pt2qa.QuantizedPair) -> None:
    weight_of(pair).data[0, 0] += 30


def write_with_numpy(pair: pt2qa.QuantizedPair) -> None:
    weight_of(pair).numpy()[0] = 3


def swap_storage(pair: pt2qa.QuantizedPair) -> None:
    weight = weight_of(pair)
    held = next(each for each in pair.quantized.buffers() if each.data_ptr() == weight.data_ptr())
    held.data = weight.flip(0).contiguous()


def train_reference(pair: pt2qa.QuantizedPair) -> None:
    with torch.no_grad():
        for parameter in pair.reference.parameters():
            parameter.mul_(1.1)


def edit_a_scale(pair: pt2qa.QuantizedPair) -> None:
    for node in pair.quantized.graph.nodes:
        if "quantize_per_tensor" in str(node.target):
            node.args = (node.args[0], node.args[1] * 2, *node.args[2:])
    pair.quantized.recompile()


CHANGES: list[Callable[[pt2qa.QuantizedPair], None]] = [
    load, assign, write_in_place, write_data, write_with_numpy, swap_storage, train_reference, edit_a_scale
]  # fmt: skip


def own_copy() -> pt2qa.QuantizedPair:
    """A pair whose graphs may change."""
    return copy.deepcopy(once())


def content(report: Any, file: Path) -> Any:
    report.save(file)
    with safe_open(file, "np") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
        return opened.metadata(), {name: each.tobytes() for name, each in arrays.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_kind_is_seen(change: Callable[[pt2qa.QuantizedPair], None], tmp_path: Path) -> None:
    pair, report = own_copy(), tmp_path / "report"
    analyses = ANALYSES["layers"], ANALYSES["weights"], ANALYSES["exact"]
    before = [content(analysis(pair, batches()), report) for analysis in analyses]
    change(pair)
    after = [content(analysis(pair, batches()), report) for analysis in analyses]
    assert before != after
    fresh = dataclasses.replace(pair)
    assert after == [content(analysis(fresh, batches()), report) for analysis in analyses]


@pytest.fixture(scope="module")
def changed() -> pt2qa.QuantizedPair:
    """A pair that all that is kept was made of before its graphs changed."""
    pair = own_copy()
    for name in ("layers", "weights", "profile", "annotations"):
        ANALYSES[name](pair, batches())
    assert pair.verify(batches()[0]) == ()
    assert pair.coverage
    load(pair)
    train_reference(pair)
    return pair


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_describes_the_graphs_as_they_are(
    name: str, changed: pt2qa.QuantizedPair, tmp_path: Path
) -> None:
    stale = dataclasses.replace(changed)
    vars(stale).update(vars(changed))
    found = content(ANALYSES[name](stale, batches()), tmp_path / "report")
    assert found == content(ANALYSES[name](dataclasses.replace(changed), batches()), tmp_path / "report")


def test_what_does_not_change_is_made_once() -> None:
    pair = own_copy()
    ANALYSES["layers"](pair, batches())
    program = pair.program
    weight_of(pair).copy_(weight_of(pair).clone())
    ANALYSES["layers"](pair, batches())
    assert pair.program is program


def test_graphs_are_looked_at_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, looks = own_copy(), []
    of = Contents.of
    monkeypatch.setattr(Contents, "of", lambda graphs: (looks.append(1), of(graphs))[1])
    ANALYSES["diagnosis"](pair, batches())
    of_others = len(looks)
    ANALYSES["layers"](pair, batches())
    assert len(looks) == of_others + 1

    @torch_defaults
    def nested() -> None:
        ANALYSES["layers"](pair, batches())
        ANALYSES["weights"](pair, batches())

    nested()
    assert len(looks) == of_others + 2


def test_a_copy_of_a_pair_has_programs_of_its_own() -> None:
    pair = copy.deepcopy(once())
    assert once().program is not pair.program
    assert pt2qa.compare_weights(pair).rows == pt2qa.compare_weights(once()).rows


def tensors() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0,), (3,), (5, 7), (33, 4097), (64, 16, 65)):
        yield torch.randn(shape, generator=generator)
        yield torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    yield torch.randn(3, 8, 300, 301, generator=generator).to(memory_format=torch.channels_last)
    yield torch.randn(400001, generator=generator)[1:]
    yield torch.randn(300, 400, 2, generator=generator).to(torch.bfloat16)[1:, 1:]
    yield torch.randn(200, 400, generator=generator, dtype=torch.complex64)
    yield torch.zeros(3).expand(70000, 3)
    yield torch.randn(400, 600, generator=generator) > 0


@pytest.mark.parametrize("tensor", [*tensors()], ids=lambda each: f"{each.dtype} {tuple(each.shape)}")
def test_a_checksum_notices_what_changes(tensor: Tensor) -> None:
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    if tensor.numel() < 2 or 0 in tensor.stride():
        return
    places = torch.randint(tensor.numel(), (20,), generator=torch.Generator().manual_seed(1)).tolist()
    for place in (0, tensor.numel() - 1, *places):
        where = tuple(int(each) for each in torch.unravel_index(torch.tensor(place), tensor.shape))
        kept = tensor[where].clone()
        tensor[where] = ~kept if tensor.dtype == torch.bool else kept + 1
        assert checksum(tensor) != before
        tensor[where] = kept
        assert checksum(tensor) == before


def test_a_checksum_notices_what_is_exchanged() -> None:
    tensor = torch.arange(1 << 18, dtype=torch.int32)
    before = checksum(tensor)
    for a, b in ((0, 1), (0, 2), (1, 8193), (5, 131077), (4096, 131072)):
        tensor[[a, b]] = tensor[[b, a]]
        assert checksum(tensor) != before
        tensor[[a, b]] = tensor[[b, a]]
    assert checksum(tensor) == before
