"""A sweep over three ops, and what becomes of one that cannot be lowered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sweep import __main__ as sweep
from tests.sweep import ops


def test_each_op_has_the_row_of_its_own_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.OPS, "fails", ops.Op(lambda x: torch.linalg.inv(x), ((2, 4, 4),)))  # type: ignore[index]
    failed: dict[str, str] = {}
    found = dict(sweep._rows(("linear + relu", "add", "fails"), 1.0, 0.0, True, failed))
    assert {name: row.op for name, row in found.items()} == {"linear + relu": "relu", "add": "add"}
    assert all(row.delegated and row.isolated_max_lsb <= 1 and not row.note for row in found.values())
    assert list(failed) == ["fails"]
    assert sweep._line("add", [found["add"]], "")[:2] == ("add", "1")


def test_a_difference_without_an_explanation_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from dataclasses import replace

    def rows(names: Any, *_: Any) -> Any:
        from pt2qa.report import DeployedRow

        good = DeployedRow(1, "x", "", "x", "dq", "int8", 0.1, True, 1.0, 0.1, 40.0, 40.0, 40.0, 40.0)
        for name in names:
            yield name, replace(good, isolated_max_lsb=9.0) if name == "tanh" else good

    monkeypatch.setattr(sweep, "_rows", rows)
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    assert sweep.main() == 1
    monkeypatch.setattr(sweep, "KNOWN", {"tanh": "a table of 256 values"})
    assert sweep.main() == 0
    assert "a table of 256 values" in (tmp_path / "build" / "sweep.md").read_text()
