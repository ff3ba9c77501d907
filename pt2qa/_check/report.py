"""The report of a structure check: what was found, by which rule, and which rules had nothing to look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Literal

from pt2qa._check.text import SEVERITIES, counted_severities, findings_summary, findings_table, findings_text
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.prose import LISTED
from pt2qa._report.rows import EXTENDED, Environment
from pt2qa._report.storage import register


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule found.

    Args:
        rule: id of the rule, such as ``unfused-pair``.
        severity: ``error``: fails, or stays in float, or gives wrong numbers; ``warning``: costs accuracy or speed;
            ``note``: good to know.
        name: the op, module, input or site; empty for the model as a whole.
        source: the user's line that made it, ``net.py:12``; empty where the graph does not say.
        why: what is wrong there, with the numbers.
        fix: what to do.
        value: what orders the findings of one rule, the largest first; nan where nothing does.
    """

    rule: str
    severity: Literal["error", "warning", "note"]
    name: str
    source: str
    why: str
    fix: str
    value: float = field(default=nan, metadata=EXTENDED)


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """What became of one rule.

    Args:
        rule: its id.
        title: what it looks for.
        outcome: ``found``; ``clear``: nothing found; ``not applied``: it had nothing to look at; ``failed``: it could
            not deal with the model, which is a fault of the rule.
        count: findings that are shown.
        silenced: findings that the user did not want to see.
        reason: why it was not applied, or failed.
    """

    rule: str
    title: str
    outcome: Literal["found", "clear", "not applied", "failed"]
    count: int
    silenced: int
    reason: str


@register("findings", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class Findings(RowReport):
    """What a structure check found.

    It is a sequence: ``len(findings)``, ``for finding in findings``; empty findings are false.

    Args:
        rows: the findings, errors first; those of one rule stand together.
        rules: what became of each rule, in the order in which they ran.
        checked: what was looked at, such as ``model``, ``annotations``, ``numbers``.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one; empty without a quantizer.
        model: the model's class name.
        environment: versions, and the model's fingerprint where it could be captured.
    """

    rows: tuple[Finding, ...]
    rules: tuple[RuleOutcome, ...]
    checked: tuple[str, ...]
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment

    rendering = Rendering(findings_table, findings_summary, findings_text)

    @property
    def error_count(self) -> int:
        """How many findings are errors."""
        return self.count("error")

    @property
    def warning_count(self) -> int:
        """How many findings are warnings."""
        return self.count("warning")

    @property
    def note_count(self) -> int:
        """How many findings are notes."""
        return self.count("note")

    def count(self, severity: str) -> int:
        """How many findings have a severity."""
        return sum(row.severity == severity for row in self.rows)

    def of(self, rule: str) -> tuple[Finding, ...]:
        """The findings of one rule."""
        return tuple(row for row in self.rows if row.rule == rule)

    def joined(self, before: Findings) -> Findings:
        """These findings, and those of an earlier check by rules that were not applied in this one.

        Args:
            before: of the same model, when less of it was there to look at.
        """
        idle = {rule.rule for rule in self.rules if rule.outcome == "not applied"}
        earlier = {rule.rule: rule for rule in before.rules if rule.rule in idle and rule.outcome != "not applied"}
        rows = (*self.rows, *(row for row in before.rows if row.rule in earlier))
        return replace(
            self,
            rows=errors_first(rows, [rule.rule for rule in self.rules]),
            rules=tuple(earlier.get(rule.rule, rule) for rule in self.rules),
            checked=tuple(dict.fromkeys((*self.checked, *before.checked))),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.rows)

    def text(self, *, sort: str = "worst", limit: int | None = LISTED, width: int | None = None) -> str:
        """The findings grouped by rule, as ``print`` shows them.

        Args:
            sort: ``worst``: errors first; ``name`` or a column: the findings of each rule in that order.
            limit: findings to show of each rule; None for all.
            width: columns of the screen; None asks the terminal, 100 where there is none.

        Raises:
            ReportError: there is no such column.
        """
        return RowReport.text(self, sort=sort, limit=limit, width=width)

    def _headline(self) -> str:
        counts = ", ".join(counted_severities(self))
        return f"<Findings of {self.model}: {counts}>"


def errors_first(rows: Iterable[Finding], rules: Sequence[str]) -> tuple[Finding, ...]:
    """Findings in the order of a report: rules with an error first, within one severity as the rules stand.

    Args:
        rows: the findings; those of one rule keep their order.
        rules: ids of the rules, in their order; findings of others come after theirs.
    """
    rows = tuple(rows)
    worst: dict[str, int] = {}
    for row in rows:
        worst[row.rule] = min(worst.get(row.rule, len(SEVERITIES)), SEVERITIES.index(row.severity))
    place = {rule: number for number, rule in enumerate(rules)}
    return tuple(sorted(rows, key=lambda row: (worst[row.rule], place.get(row.rule, len(place)))))
