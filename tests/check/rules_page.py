"""Writes ``docs/rules.md`` from the rules themselves: ``python -m tests.check.rules_page``."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from pt2qa._check.rules import RULES
from pt2qa.plugins import Rule, available, rules_of
from pt2qa.report import Findings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
WIDTH = 100

HEAD = """\
# Rules of the structure check

What `pt2qa.check` and `pt2qa check` look for. Each rule below comes with what it means, an example that triggers it,
what is then printed, and the same example mended. The page is generated from the rules: `python -m
tests.check.rules_page`. How to run the check, silence a rule or add one is in [check.md](check.md).

| rule | severity | what it finds |
| --- | --- | --- |
"""


def every_rule() -> dict[str, Rule]:
    """pt2qa's rules, then those of the installed plug-ins."""
    brought = {rule.id: rule for plugin in available().values() for rule in rules_of(plugin)}
    return {**RULES, **brought}


def run(source: str) -> Findings:
    """What an example finds."""
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "net.py", "exec", dont_inherit=True), namespace)
    findings = namespace["findings"]
    assert isinstance(findings, Findings)
    return findings


def shown(rule: Rule, findings: Findings) -> str:
    """What the screen shows of one rule."""
    outcome = next(outcome for outcome in findings.rules if outcome.rule == rule.id)
    return replace(findings, rows=findings.of(rule.id), rules=(outcome,), notes=()).text(width=WIDTH).split("\n\n")[1]


def section(rule: Rule, printed: str) -> str:
    """What the page says about one rule."""
    return (
        f"## {rule.id}\n\n**{rule.severity}**: {rule.title}. {rule.why}\n\n```python\n{rule.example}```\n\n"
        f"```text\n{printed}\n```\n\nMended:\n\n```python\n{rule.mended}```\n"
    )


def head() -> str:
    """The page down to the table of the rules."""
    rows = (f"| [{rule.id}](#{rule.id}) | {rule.severity} | {rule.title} |\n" for rule in every_rule().values())
    return HEAD + "".join(rows)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sections = [section(rule, shown(rule, run(rule.example))) for rule in every_rule().values()]
    PAGE.write_text("\n".join([head(), *sections]), encoding="utf-8")
