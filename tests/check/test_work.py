"""What a check does once, whatever the number of rules; time follows from it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._check import context as context_of
from pt2qa._graph.handles import copy_to_edit, copy_without_values
from pt2qa._weights import sums as sums_of

EXAMPLE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


class InPlace(nn.Module):
    """A batch norm to fold, one that cannot be, an in-place op, and two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.late = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.late(self.relu(self.norm(self.conv(x)))).mean((2, 3)))
        return y


@pytest.fixture(scope="module", params=["xnnpack", "xnnpack:per_channel=false", "x86"])
def pair(request: pytest.FixtureRequest) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return pt2qa.quantize(pt2qa.capture(InPlace().eval(), EXAMPLE), request.param, [EXAMPLE], progress=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often a quantizer annotated, each weight was read, a parameter was copied, and data was run."""
    counted: Counter[Any] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    count(context_of, "annotate")
    count(context_of, "compare_rounding")
    count(sums_of, "weight_sums")
    count(nn.Parameter, "__deepcopy__")
    return counted


def test_a_check_of_a_pair_annotates_once_and_reads_each_weight_once(
    pair: pt2qa.QuantizedPair, calls: Counter[Any]
) -> None:
    findings = pt2qa.check(pair, batches=[EXAMPLE], progress=False)
    assert {outcome.outcome for outcome in findings.rules} <= {"found", "clear", "not applied"}
    assert calls["annotate"] == 1  # with the other spelling of the in-place op
    assert calls["compare_rounding"] == 1
    weights = pt2qa.compare_weights(pair).rows
    assert calls["weight_sums"] == 2 * len(weights)  # once in the check, once here
    assert calls["__deepcopy__"] == 0


@pytest.mark.parametrize("form", ["program", "graph"])
def test_a_check_of_what_was_exported_copies_no_weight(form: str, calls: Counter[Any]) -> None:
    program = torch.export.export(InPlace().eval(), EXAMPLE, strict=True)
    subject = program if form == "program" else program.module()
    calls.clear()
    pt2qa.check(subject, quantizer="xnnpack", progress=False)
    assert calls["__deepcopy__"] == 0


def test_a_copy_with_its_own_graph_shares_tensors_alone(pair: pt2qa.QuantizedPair) -> None:
    graph = pair.reference
    copied, bare = copy_to_edit(graph), copy_without_values(graph)
    assert copied.graph is not graph.graph
    assert {id(each) for each in copied.parameters()} == {id(each) for each in graph.parameters()}
    assert all(each.is_meta for each in (*bare.parameters(), *bare.buffers()))
    assert not any(each.is_meta for each in (*graph.parameters(), *graph.buffers()))
    for node in list(copied.graph.nodes)[::-1]:
        copied.graph.erase_node(node)
    assert len(graph.graph.nodes)


def test_the_partitioner_is_asked_about_each_kind_of_op_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("executorch")
    from pt2qa_xnnpack import delegation

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4)).eval()
    example = (torch.randn(2, 4),)
    asked = []
    ask = delegation._partitioned
    monkeypatch.setattr(delegation, "_answers", {})
    monkeypatch.setattr(delegation, "_partitioned", lambda *given: asked.append(given) or ask(*given))
    found = []
    for _ in range(2):
        pair = pt2qa.quantize(pt2qa.capture(model, example), "xnnpack", [example], progress=False)
        found.append([(row.name, row.why) for row in pt2qa.check(pair, rules=["xnnpack-portable-op"])])
    assert len(asked) == 1
    assert found[0] == found[1]
    assert [name for name, _ in found[0]] == ["1/softplus"]
