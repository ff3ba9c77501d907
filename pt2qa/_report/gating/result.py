"""What a gate found: its checks, each passed or missed, and the texts that people and build servers read."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from pt2qa._report.formats import exact
from pt2qa._report.prose import LISTED, counted, listed, sections, wrap
from pt2qa._report.table import screen_width


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One requirement, or one comparison with the baseline, and whether it was met.

    Args:
        what: what was measured: ``sqnr``, ``rows.isolated_sqnr``, ``layer1.*:rows.sqnr``; against a baseline ``drop of
            rows.isolated_sqnr``.
        limit: what it must be: ``>= 20 dB``.
        measured: the number; of rows that of the worst one; nan where there is none.
        unit: of ``measured``: ``dB`` or empty.
        passed: whether all that it is about meet the limit.  Where there is no number it is missed.
        rows: how many rows it is about; 0 for a number of the whole report.
        where: the rows that miss it, the worst first, each with its number or why it has none; of a check that is
            passed the row that is nearest to the limit.
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
        """The requirement as a line."""
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
        """The first of several rows that miss it, and how many there are besides; none where the outcome says it."""
        if len(self.where) <= 1:
            return ()
        rest = len(self.where) - LISTED
        return (*self.where[:LISTED], *([f"and {rest} more"] if rest > 0 else []))


@dataclass(frozen=True, slots=True)
class GateResult:
    """Whether a report meets what was required of it.

    Args:
        checks: the requirements in the order given, then the comparisons with the baseline.
        warnings: batches that are in none of the numbers, and why the baseline may not be comparable.
        notes: rows that only one of the reports has, versions that differ, rows without a number in both.
        kind: of the report, e.g. ``layers``.
        quantizer: the plug-in's name, or the class of a quantizer without one.
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
        """Whether every check is passed."""
        return all(check.passed for check in self.checks)

    @property
    def missed(self) -> tuple[GateCheck, ...]:
        """The checks that are not passed."""
        return tuple(check for check in self.checks if not check.passed)

    def text(self, *, width: int | None = None) -> str:
        """The verdict, then the checks, those that are missed first, then what else to know.

        Args:
            width: columns of the screen; None asks the terminal, 100 where there is none.
        """
        columns = screen_width(width)
        subject = ", ".join(part for part in (self.model, self.quantizer, self.kind) if part)
        total = counted(len(self.checks), "check")
        verdict = f"Passed: {total}" if self.passed else f"Missed: {len(self.missed)} of {total}"
        ordered = sorted(self.checks, key=lambda check: check.passed)
        return sections(
            [
                wrap(f"{verdict} ({subject}).", columns, indent="  "),
                "\n".join(_check_text(check, columns) for check in ordered),
                listed(f"Warnings ({len(self.warnings)})", self.warnings, columns),
                listed(f"Notes ({len(self.notes)})", self.notes, columns),
            ]
        )

    def junit(self) -> str:
        """The checks as JUnit XML, each a test case, for build servers that read it."""
        # Imported here: the XML library is only needed for this.
        from pt2qa._report.gating.formats import junit_xml

        return junit_xml(self)

    def github(self) -> str:
        """What is missed and the warnings as workflow commands, which GitHub Actions turns into annotations."""
        from pt2qa._report.gating.formats import github_commands

        return github_commands(self)

    def __str__(self) -> str:
        return self.text()


def limit_text(value: float, unit: str) -> str:
    """A limit as it was written, with its unit."""
    return f"{value:.12g} {unit}".rstrip()


def _check_text(check: GateCheck, width: int) -> str:
    first = f"  {'passed' if check.passed else 'missed'}  {check.title}: {check.outcome}"
    places = (wrap(f"{' ' * 10}{place}", width, indent=" " * 12) for place in check.places)
    return "\n".join([wrap(first, width, indent=" " * 10), *places])
