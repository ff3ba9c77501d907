"""What a gate found: checks, each passed or missed, as text, JUnit XML and annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from xml.etree import ElementTree

from pt2qa._printable import clean
from pt2qa._report.prose import LISTED, counted, exact, listed, sections, wrap
from pt2qa._report.rows import Row
from pt2qa._report.table import screen_width


@dataclass(frozen=True, slots=True, eq=False)
class GateCheck(Row):
    """One requirement, or one comparison with the baseline, and whether it was met.

    Args:
        what: what was measured: ``sqnr``, ``rows.isolated_sqnr``, ``layer1.*:rows.sqnr``; against a baseline ``drop of
            rows.isolated_sqnr``.
        limit: what it must be: ``>= 20 dB``.
        measured: the number; for rows, the worst row's; nan if there is none.
        unit: of ``measured``: ``dB`` or empty.
        passed: whether all checked numbers meet the limit.  Without a number it is missed.
        rows: how many rows are checked; 0 for a number of the whole report.
        where: the rows that miss it, worst first, each with its number or why it has none; if passed, the row closest
            to the limit.
    """

    what: str
    limit: str
    measured: float
    unit: str
    passed: bool
    rows: int
    where: tuple[str, ...]

    @property
    def title(self) -> str:
        """The requirement in one line."""
        return f"{self.what} {self.limit}"

    @property
    def outcome(self) -> str:
        """What was measured, in one sentence."""
        if not self.rows:
            shown = "no number" if isnan(self.measured) else exact(self.measured, self.unit)
            return ", ".join((shown, *self.where))
        if self.passed:
            return self.where[0] if self.rows == 1 else f"worst of {self.rows} rows is {self.where[0]}"
        if len(self.where) == 1:
            return self.where[0] if self.rows == 1 else f"1 of {self.rows} rows misses it, {self.where[0]}"
        return f"{len(self.where)} of {self.rows} rows miss it"

    @property
    def places(self) -> tuple[str, ...]:
        """The first of several rows that miss it, and how many more there are; empty if the outcome says it."""
        if len(self.where) <= 1:
            return ()
        rest = len(self.where) - LISTED
        return (*self.where[:LISTED], *([f"and {rest} more"] if rest > 0 else []))

    def text(self, width: int) -> str:
        first = f"  {'passed' if self.passed else 'missed'}  {self.title}: {self.outcome}"
        places = (wrap(f"{' ' * 10}{place}", width, indent=" " * 12) for place in self.places)
        return "\n".join([wrap(first, width, indent=" " * 10), *places])


@dataclass(frozen=True, slots=True)
class GateResult:
    """Whether a report meets its requirements.

    What :func:`pt2qa.gate` returns.

    Args:
        checks: the requirements in the order given, then the comparisons with the baseline.
        warnings: batches excluded from all numbers, and why the baseline may not be comparable.
        notes: rows that only one of the reports has, versions that differ, rows without a number in both.
        kind: of the report, e.g. ``layers``.
        quantizer: the plug-in's name, or a torchao quantizer's class.
        model: the model's class name.
    """

    checks: tuple[GateCheck, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    kind: str
    quantizer: str
    model: str

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there is one: what checked nothing has shown nothing."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def missed(self) -> tuple[GateCheck, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def text(self, *, width: int | None = None) -> str:
        """The verdict, then the checks, missed ones first, then warnings and notes.

        Args:
            width: of the screen, in characters; None: the terminal's, or 100 without one.
        """
        columns = screen_width(width)
        total = counted(len(self.checks), "check")
        missed = f"Missed: {len(self.missed)} of {total}" if self.checks else "Missed: nothing was checked"
        verdict = f"Passed: {total}" if self.passed else missed
        ordered = sorted(self.checks, key=lambda check: check.passed)
        return sections(
            [
                wrap(f"{verdict} ({self._subject(', ')}).", columns, indent="  "),
                "\n".join(check.text(columns) for check in ordered),
                listed(f"Warnings ({len(self.warnings)})", self.warnings, columns),
                listed(f"Notes ({len(self.notes)})", self.notes, columns),
            ]
        )

    def junit(self) -> str:
        """The checks as JUnit XML, each a test case, for build servers that read it.

        Source:
            the schema of Jenkins' JUnit plug-in; GitLab, Azure and others read the same parts.
        """
        counts = {"tests": str(len(self.checks)), "failures": str(len(self.missed)), "errors": "0"}
        suites = ElementTree.Element("testsuites", {"name": "pt2qa gate", **counts})
        named = {"name": clean(self._subject(" ")), **counts, "skipped": "0"}
        suite = ElementTree.SubElement(suites, "testsuite", named)
        for check in self.checks:
            name = {"classname": f"pt2qa.gate.{clean(self.kind)}", "name": clean(check.title)}
            case = ElementTree.SubElement(suite, "testcase", name)
            if not check.passed:
                failure = ElementTree.SubElement(case, "failure", {"type": "missed", "message": clean(check.outcome)})
                failure.text = "\n".join(map(clean, check.where))
        if said := [*(f"warning: {line}" for line in self.warnings), *self.notes]:
            ElementTree.SubElement(suite, "system-out").text = "\n".join(map(clean, said))
        ElementTree.indent(suites)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'

    def github(self) -> str:
        """Missed checks and warnings as workflow commands, which GitHub Actions turns into annotations.

        Source:
            "Workflow commands for GitHub Actions", docs.github.com; for escaping, ``actions/toolkit``,
            ``packages/core/src/command.ts``.
        """
        subject = self._subject(" ")
        missed = [
            _command("error", f"pt2qa gate: {check.title}", f"{subject}: {check.outcome}", *check.places)
            for check in self.missed
        ]
        return "\n".join(missed + [_command("warning", "pt2qa gate", f"{subject}: {line}") for line in self.warnings])

    def _subject(self, separator: str) -> str:
        return separator.join(part for part in (self.model, self.quantizer, self.kind) if part)

    def __str__(self) -> str:
        return self.text()


def _command(name: str, title: str, *lines: str) -> str:
    r"""A workflow command.

    >>> _command("error", "a: 1, 2", "50 %", "and more")
    '::error title=a%3A 1%2C 2::50 %25%0Aand more'
    """
    title = _escaped(clean(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{name} title={title}::{'%0A'.join(_escaped(clean(line)) for line in lines)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


@dataclass(frozen=True, slots=True)
class Item:
    """One number of a check; ``badness`` orders them, larger is worse, and ``shown`` may say why there is none."""

    place: str
    number: float
    good: bool
    badness: float
    shown: str


def check_of(what: str, limit: str, unit: str, items: Sequence[Item], *, nothing: str) -> GateCheck:
    """A check of the rows of a table; ``nothing`` says why it is missed if there is no row."""
    if not items:
        return GateCheck(what, limit, nan, unit, False, 0, (nothing,))
    bad = [item for item in items if not item.good]
    # Numbers first, worst first; then rows without one.
    ordered = sorted(bad or items, key=lambda item: (isnan(item.badness), -item.badness))
    where = tuple(f"{item.place}: {item.shown}" for item in (ordered if bad else ordered[:1]))
    return GateCheck(what, limit, ordered[0].number, unit, not bad, len(items), where)


def limit_text(value: float, unit: str) -> str:
    """A limit as it was written, with its unit."""
    return f"{value:.12g} {unit}".rstrip()
