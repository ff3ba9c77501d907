"""The examples of the rules: ``examples/<rule>.md`` holds a program, what the rule prints of it, and a patch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pt2qa._check.rules import RULES
from pt2qa.plugins import Rule, available, rules_of
from pt2qa.report import Findings

FOLDER = Path(__file__).parent / "examples"
_BLOCKS = re.compile(r"```python\n(.*)```\n\n```text\n(.*)```\n\n```diff\n(.*)```\n", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A program in which a rule finds something.

    Attributes:
        program: Python source that makes ``findings``.
        printed: what the screen shows of the rule.
        patch: the smallest change that fixes it, as ``diff -u`` writes it, with ``@@`` alone between two places.
    """

    program: str
    printed: str
    patch: str

    @property
    def fixed(self) -> str:
        """The program with the patch applied."""
        fixed = self.program
        for hunk in self.patch.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] != mark) for mark in "+-")
            assert f"\n{fixed}".count(f"\n{before}") == 1, f"the program has this not once:\n{before}"
            fixed = f"\n{fixed}".replace(f"\n{before}", f"\n{after}")[1:]
        return fixed


def every_rule() -> dict[str, Rule]:
    """pt2qa's rules, then those of the installed plug-ins."""
    brought = {rule.id: rule for plugin in available().values() for rule in rules_of(plugin)}
    return {**RULES, **brought}


def example_of(rule: str) -> Example:
    """The example of a rule."""
    path = FOLDER / f"{rule}.md"
    blocks = _BLOCKS.fullmatch(path.read_text(encoding="utf-8"))
    assert blocks, f"{path} is not a python, a text and a diff block"
    return Example(*blocks.groups())


def findings_of(program: str) -> Findings:
    """What a program finds."""
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(program, "net.py", "exec", dont_inherit=True), namespace)
    findings = namespace["findings"]
    assert isinstance(findings, Findings)
    return findings


def shown(rule: str, findings: Findings) -> str:
    """What the screen shows of one rule."""
    outcome = next(outcome for outcome in findings.rules if outcome.rule == rule)
    text = replace(findings, rows=findings.of(rule), rules=(outcome,), notes=()).text(width=100)
    return next(part for part in text.split("\n\n") if f" {rule} (" in part.split("\n")[0]) + "\n"
