"""The report of a structure check: what was found, by which rule, and which rules did not apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import nan
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._report.base import DataReport, Grade, Group, Report
from pt2qa._report.prose import LISTED, by_reason, counted, sections, wrap
from pt2qa._report.rows import Row, column, derived
from pt2qa._report.storage import register

SEVERITIES: Final = ("error", "warning", "note")
"""The worst first."""


@dataclass(frozen=True, slots=True, eq=False)
class Finding(Row):
    """One thing that a rule found.

    A row of what :func:`pt2qa.check` returns.

    Args:
        rule: id of the rule, such as ``unfused-pair``.
        severity: ``error``: fails, stays in float, or gives wrong numbers; ``warning``: costs accuracy or speed;
            ``note``: good to know.
        name: the op, module, input or site; empty for the model as a whole.
        source: the user's line that made it, ``net.py:12``; empty if the graph does not say.
        why: what is wrong there, with the numbers.
        fix: what to do.
        value: sorts the findings of one rule, the largest first; nan if nothing does.
    """

    shown: ClassVar[tuple[str, ...]] = ("severity", "rule", "name", "source", "why", "fix")

    rule: Annotated[str, column(key=True, importance=0)]
    severity: Annotated[Literal["error", "warning", "note"], column(importance=0)]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=20)]
    source: Annotated[str, column(importance=2, shrinks_to=12)]
    why: Annotated[str, column(importance=0, shrinks_to=20)]
    fix: Annotated[str, column(importance=1, shrinks_to=20)]
    value: Annotated[float, column(extended=True)] = nan


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The outcome of one rule.

    Args:
        rule: its id.
        title: what it looks for.
        outcome: ``found``; ``clear``: nothing found; ``not applied``: it had nothing to look at; ``failed``: it could
            not handle the model, which is a bug in the rule.
        count: findings shown.
        silenced: findings that the user silenced.
        reason: why it was not applied, or failed.
    """

    rule: Annotated[str, column(key=True)]
    title: str
    outcome: Literal["found", "clear", "not applied", "failed"]
    count: int
    silenced: int
    reason: str


@register("findings", schema=2, oldest=1, since={"batches": 2, "samples": 2, "set_apart": 2, "input_ranges": 2})
@dataclass(frozen=True, slots=True, repr=False)
class Findings(DataReport):
    """What a structure check found.

    It is a sequence: ``len(findings)``, ``for finding in findings``; empty findings are false.

    What :func:`pt2qa.check` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: the findings, errors first, grouped by rule.
        rules: the outcome of each rule, in the order they ran.
        checked: what was looked at, such as ``model``, ``annotations``, ``numbers``.
    """

    instead_of_merging: ClassVar[str] = "Run check once, with all batches if rules are to read any."
    usual_measures: ClassVar[tuple[str, ...]] = ("severity",)
    ties: ClassVar[str] = "rule"

    rows: tuple[Finding, ...]
    rules: tuple[RuleOutcome, ...]
    checked: tuple[str, ...]

    @derived(judged=True)
    def error_count(self) -> int:
        """How many findings are errors."""
        return self.count("error")

    @derived(judged=True)
    def warning_count(self) -> int:
        """How many findings are warnings."""
        return self.count("warning")

    @derived(judged=True)
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
        """These findings, and an earlier check's findings by rules that this one did not apply.

        Args:
            before: findings on the same model, given less of it.
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
            width: columns of the screen; None: the terminal's, or 100 without one.

        Raises:
            ReportError: there is no such column.
        """
        return Report.text(self, sort=sort, limit=limit, width=width)

    def grade(self) -> Grade:
        return "bad" if self.error_count else "warning" if self.warning_count or not self.health.is_sound else "good"

    def lines(self) -> Sequence[str]:
        """How many findings have each severity, and what was looked at."""
        faults, said = self._faults(), [f"{', '.join(self._counts())}.", *self._summary()]
        return [*faults, *said, *([] if faults else self._data())]

    def groups(self, sort: str = "worst") -> tuple[Group, ...]:
        """The findings of each rule."""
        titles, groups = {outcome.rule: outcome.title for outcome in self.rules}, []
        for rule, found in groupby(self.rows, key=lambda row: row.rule):
            rows = tuple(found)
            rows = rows if sort in ("worst", "graph") else tuple(self.ranked(rows, sort))
            fix = rows[0].fix if len({row.fix for row in rows}) == 1 else ""
            groups.append(Group(rule, rows[0].severity, titles.get(rule, "unknown to this report"), rows, fix))
        return tuple(groups)

    def _headline(self) -> str:
        return f"<Findings of {self.model}: {', '.join(self._counts())}>"

    def _title(self, sort: str) -> str:
        subject = f"{self.model} with {self.quantizer}" if self.quantizer else self.model
        return f"Check of {subject}: {', '.join(self._counts())}"

    def _ordered(self, sort: str) -> tuple[Sequence[Finding], str | None]:
        return (self.rows, None) if sort == "worst" else Report._ordered(self, sort)

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        return sections(_printed(group, limit, width) for group in self.groups(sort))

    def _summary(self) -> Sequence[str]:
        clear = sum(rule.outcome == "clear" for rule in self.rules)
        idle = [rule for rule in self.rules if rule.outcome == "not applied"]
        silenced = sum(rule.silenced for rule in self.rules)
        looked = f"Looked at {', '.join(self.checked) or 'nothing'}. {counted(clear, 'rule')} found nothing"
        lines = [f"{looked}, {len(idle)} not applied, {counted(silenced, 'finding')} silenced."]
        lines += [f"Not applied, {reason}." for reason in by_reason((rule.rule, rule.reason) for rule in idle)]
        failed = (f"{rule.rule}: {rule.reason}" for rule in self.rules if rule.outcome == "failed")
        return [*lines, *(f"Failed, please report it: {text}" for text in failed)]

    def _counts(self) -> list[str]:
        """``1 error``, ``2 warnings``, ``0 notes``."""
        return [counted(self.count(severity), severity) for severity in SEVERITIES]


def _printed(group: Group, limit: int | None, width: int) -> str:
    shown = group.rows[:limit]
    head = f"{group.severity.upper()} {group.name} ({len(group.rows)}): {group.title}"
    lines = [wrap(head, width, indent="  ")]
    for (why, fix), alike in groupby(shown, key=lambda row: (row.why, row.fix)):
        places = ", ".join(_place(row) for row in alike)
        lines.append(wrap(f"  {places}: {why}" if places else f"  {why}", width, indent="    "))
        lines += [] if group.fix else [wrap(f"    -> {fix}", width, indent="       ")]
    if len(group.rows) > len(shown):
        lines.append(f"  and {len(group.rows) - len(shown)} more")
    return "\n".join([*lines, *([wrap(f"  -> {group.fix}", width, indent="     ")] if group.fix else [])])


def _place(row: Finding) -> str:
    return f"{row.name} ({row.source})" if row.name and row.source else row.name or row.source


def errors_first(rows: Iterable[Finding], rules: Sequence[str]) -> tuple[Finding, ...]:
    """Findings in the order of a report: rules with an error first, within a severity in rule order.

    The findings of one rule keep their order; those of rules that are not listed come after the others.
    """
    rows = tuple(rows)
    worst: dict[str, int] = {}
    for row in rows:
        worst[row.rule] = min(worst.get(row.rule, len(SEVERITIES)), SEVERITIES.index(row.severity))
    place = {rule: number for number, rule in enumerate(rules)}
    return tuple(sorted(rows, key=lambda row: (worst[row.rule], place.get(row.rule, len(place)))))
