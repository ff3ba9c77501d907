"""A pattern that a quantizer exports again and again is exported once; whatever could differ is exported anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pt2qa._conformance.pattern_exports import patterns_exported_once


def pattern(function: Callable[[Tensor], Tensor], inplace: bool = False) -> nn.Module:
    """A module that is made anew, as quantizers make theirs."""

    class Pattern(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x.add_(1) if inplace else x + 1)

    return Pattern()


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What reaches ``torch.export.export``."""
    export, seen = torch.export.export, []

    def count(mod, *args, **kwargs):
        seen.append(mod)
        return export(mod, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", count)
    return seen


def test_the_same_pattern_is_exported_once_and_given_as_copies(exports: list[nn.Module]) -> None:
    with patterns_exported_once():
        graphs = [
            torch.export.export(pattern(torch.sinh), (torch.ones(3),), {}, strict=True).module() for _ in range(3)
        ]
    assert len(exports) == 1
    graphs[0].graph.eliminate_dead_code()
    graphs[0].graph.erase_node(next(iter(reversed(graphs[0].graph.nodes))))
    assert [len(graph.graph.nodes) for graph in graphs[1:]] == [len(graphs[0].graph.nodes) + 1] * 2
    assert torch.equal(graphs[1](torch.ones(3)), torch.full((3,), 2.0).sinh())


def test_another_function_flag_shape_or_mode_is_exported_anew(exports: list[nn.Module]) -> None:
    with patterns_exported_once():
        for module, size, strict in [
            (pattern(torch.cosh), 3, True),
            (pattern(torch.tan), 3, True),
            (pattern(torch.cosh, inplace=True), 3, True),
            (pattern(torch.cosh), 4, True),
            (pattern(torch.cosh), 3, False),
        ]:
            torch.export.export(module, (torch.ones(size),), {}, strict=strict)
    assert len(exports) == 5


def test_modules_with_parameters_are_no_patterns(exports: list[nn.Module]) -> None:
    with patterns_exported_once():
        for _ in range(2):
            torch.export.export(nn.Linear(2, 2), (torch.ones(2, 2),))
    assert len(exports) == 2


def test_export_is_as_before_afterwards() -> None:
    before = torch.export.export
    with patterns_exported_once():
        assert torch.export.export is not before
    assert torch.export.export is before

    def stop() -> None:
        with patterns_exported_once():
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop()
    assert torch.export.export is before
