"""Every rule finds what its example has, not what its mended example has, and the page shows what it prints."""

from __future__ import annotations

import re

import pytest

from tests.check.rules_page import PAGE, every_rule, head, run, shown

RULES = every_rule()
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


def words(text: str) -> list[str]:
    """A text without its numbers, which differ from machine to machine, and without its line breaks."""
    return _NUMBER.sub("#", text).split()


@pytest.mark.parametrize("rule", RULES)
def test_the_example_is_found_and_the_page_shows_it(rule: str) -> None:
    findings = run(RULES[rule].example)
    assert findings.of(rule), [(outcome.outcome, outcome.reason) for outcome in findings.rules if outcome.rule == rule]
    page = PAGE.read_text(encoding="utf-8").partition(f"\n## {rule}\n")[2].partition("\n## ")[0]
    assert page, f"docs/rules.md has no section {rule}: python -m tests.check.rules_page writes it"
    for part in (RULES[rule].why, RULES[rule].example, RULES[rule].mended):
        assert part in page
    printed = page.partition("```text\n")[2].partition("```")[0]
    assert words(printed) == words(shown(RULES[rule], findings))


@pytest.mark.parametrize("rule", RULES)
def test_the_mended_example_is_clear(rule: str) -> None:
    findings = run(RULES[rule].mended)
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


def test_the_page_lists_every_rule_and_no_other() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(head())
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(RULES)
