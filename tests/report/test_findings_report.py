"""Findings come back from their file, group by rule on any screen, and count what they do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pt2qa.errors import ReportError
from pt2qa.report import Environment, Finding, Findings, RuleOutcome, load

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")


def finding(rule: str, name: str, why: str, fix: str, **changes: object) -> Finding:
    plain = Finding(rule=rule, severity="warning", name=name, source="net.py:12", why=why, fix=fix)
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture
def findings() -> Findings:
    """One error about the model, seven alike warnings, two notes with a fix each."""
    alike = [
        finding(
            "unfused-pair",
            f"features.{index}.conv.0.0/conv2d",
            "rounded before hardtanh, although the backend runs both as one",
            "pt2qa.reconfigure fuses them, or overrides with Edit('fuse', ...)",
            value=7.0 - index,
        )
        for index in range(7)
    ]
    notes = [
        finding("tied-weights", "head/linear", "reads embed.weight, too", "nothing, if meant so", severity="note"),
        finding("tied-weights", "tail/linear", "reads head.weight, too", "copy it", severity="note", source=""),
    ]
    error = finding(
        "quantizer-fails", "", "IndexError: list index out of range", "report it", severity="error", source=""
    )
    outcomes = (
        RuleOutcome("unfused-pair", "op pairs that are rounded in between", "found", 7, 1, ""),
        RuleOutcome("quantizer-fails", "the quantizer fails", "found", 1, 0, ""),
        RuleOutcome("tied-weights", "weights with two readers", "found", 2, 0, ""),
        RuleOutcome("train-mode", "dropout or batch norm in training mode", "clear", 0, 0, ""),
        RuleOutcome("saturation", "values at the clamp", "not applied", 0, 0, "without data: give batches="),
        RuleOutcome("unused-range", "integers that no value uses", "not applied", 0, 0, "without data: give batches="),
    )
    return Findings(
        (error, *alike, *notes),
        outcomes,
        ("pair", "annotations"),
        notes=("2 ops fell back",),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


@pytest.mark.parametrize("width", [100, 60, 40])
def test_text(findings: Findings, golden: Callable[[str, str], None], width: int) -> None:
    text = findings.text(width=width)
    golden(f"findings-{width}", text)
    assert max(map(len, text.splitlines())) <= width


def test_text_of_nothing(findings: Findings, golden: Callable[[str, str], None]) -> None:
    golden("findings-none", replace(findings, rows=(), notes=(), quantizer="").text(width=80))


def test_table(findings: Findings, golden: Callable[[str, str], None]) -> None:
    golden("findings-table", findings.table(limit=4, width=100))


def test_all_are_shown_without_a_limit(findings: Findings) -> None:
    assert "and 2 more" in findings.text()
    assert all(row.name in findings.text(limit=None) for row in findings)
    assert "more" not in findings.text(limit=None)


def test_sorting_keeps_rules_together(findings: Findings) -> None:
    text = findings.text(sort="name", limit=None)
    assert text.index("features.0.") < text.index("features.6.") < text.index("head/linear")
    with pytest.raises(ReportError, match="cannot sort by 'colour'"):
        findings.text(sort="colour")


def test_counts_and_sequence(findings: Findings) -> None:
    assert (findings.error_count, findings.warning_count, findings.note_count) == (1, 7, 2)
    assert len(findings) == 10
    assert [row.name for row in findings.of("tied-weights")] == ["head/linear", "tail/linear"]
    assert not replace(findings, rows=())
    assert repr(findings) == "<Findings of Net: 1 error, 7 warnings, 2 notes>"


def test_round_trip(findings: Findings, tmp_path) -> None:  # type: ignore[no-untyped-def]
    findings.save(tmp_path / "findings.safetensors")
    again = load(tmp_path / "findings.safetensors")
    assert isinstance(again, Findings)
    assert [replace(row, value=0.0) for row in again] == [replace(row, value=0.0) for row in findings]
    assert [row.value for row in again.of("unfused-pair")] == [row.value for row in findings.of("unfused-pair")]
    assert again.rules == findings.rules
    assert str(again) == str(findings)


def test_data_frame_and_csv(findings: Findings) -> None:
    frame = findings.to_pandas()
    assert list(frame.columns) == ["rule", "severity", "name", "source", "why", "fix"]
    assert list(findings.to_pandas(extended=True).columns)[-1] == "value"
    assert findings.csv().splitlines()[0] == "rule,severity,name,source,why,fix"


def test_joined_with_an_earlier_check_rules_keep_what_they_found_there(findings: Findings) -> None:
    later = replace(
        findings,
        rows=findings.of("tied-weights"),
        rules=tuple(
            replace(rule, outcome="not applied", reason="to pairs") if rule.rule != "tied-weights" else rule
            for rule in findings.rules
        ),
        checked=("pair", "layers"),
    )
    both = later.joined(findings)
    assert [row.rule for row in both] == [row.rule for row in findings]
    assert {rule.rule: rule.outcome for rule in both.rules}["unfused-pair"] == "found"
    assert both.checked == ("pair", "layers", "annotations")


def test_a_rule_that_fails_is_shown(findings: Findings) -> None:
    broken = replace(findings.rules[0], outcome="failed", reason="KeyError: 'x'")
    assert "Failed, please report it: unfused-pair: KeyError: 'x'" in replace(findings, rules=(broken,)).summary()


def test_findings_of_a_rule_that_the_report_does_not_list_are_shown(findings: Findings) -> None:
    alone = replace(findings, rules=())
    assert "ERROR quantizer-fails (1): unknown to this report" in str(alone)
    assert len(alone.joined(findings)) == len(findings)
