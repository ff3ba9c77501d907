"""Every rule finds what its example has, and nothing once the example is fixed."""

from __future__ import annotations

import re

import pytest

from pt2qa_xnnpack.internals import executorch_release
from tests.check.rule_examples import FOLDER, every_rule, example_of, findings_of, shown
from tests.check.rules_page import page

RULES = every_rule()
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


def words(text: str) -> list[str]:
    """A text without its numbers and its line breaks."""
    return _NUMBER.sub("#", text).split()


def numbers(text: str) -> list[float]:
    return [float(found.group()) for found in _NUMBER.finditer(text)]


NOT_FROM = {"xnnpack-pool-stride": (1, 5)}
"""Rules about what ExecuTorch refuses, by the release that takes it."""


@pytest.mark.parametrize("rule", RULES)
def test_the_example_prints_what_the_rule_finds(rule: str) -> None:
    example = example_of(rule)
    findings = findings_of(example.program)
    if rule in NOT_FROM and executorch_release() >= NOT_FROM[rule]:
        assert findings.of(rule) == ()
        pytest.skip("ExecuTorch takes it")
    assert findings.of(rule), [(outcome.outcome, outcome.reason) for outcome in findings.rules if outcome.rule == rule]
    text = shown(rule, findings)
    assert words(text) == words(example.printed)
    # They differ from machine to machine, but not by much.
    assert numbers(text) == pytest.approx(numbers(example.printed), rel=0.1, abs=0.05)


@pytest.mark.parametrize("rule", RULES)
def test_the_fixed_example_is_clear(rule: str) -> None:
    findings = findings_of(example_of(rule).fixed)
    assert findings.of(rule) == ()
    outcome = next(outcome for outcome in findings.rules if outcome.rule == rule)
    assert outcome.outcome in ("clear", "not applied")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_written_as_the_others(rule: str) -> None:
    found = RULES[rule]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found.id)
    assert found.title[0].islower() or found.title.split()[0].isupper()
    assert not found.title.endswith(".")
    assert not found.fix.endswith(".")
    assert found.why.endswith(".")


def test_the_page_has_every_rule_and_no_example_is_left_over() -> None:
    assert re.findall(r"^## (.+)$", page(), re.MULTILINE) == list(RULES)
    assert {path.stem for path in FOLDER.iterdir()} == RULES.keys()
