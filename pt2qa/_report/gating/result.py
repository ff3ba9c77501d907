"""The result of a gate: its checks, each passed or missed, and the texts for people and build servers."""

from __future__ import annotations

from dataclasses import dataclass

from pt2qa._report.gating.checks import GateCheck
from pt2qa._report.gating.formats import github_commands, junit_xml
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.table import screen_width


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
                "\n".join(_check_text(check, columns) for check in ordered),
                listed(f"Warnings ({len(self.warnings)})", self.warnings, columns),
                listed(f"Notes ({len(self.notes)})", self.notes, columns),
            ]
        )

    def junit(self) -> str:
        """The checks as JUnit XML, each a test case, for build servers that read it."""
        said = [*(f"warning: {line}" for line in self.warnings), *self.notes]
        return junit_xml(self._subject(" "), self.kind, self.checks, said)

    def github(self) -> str:
        """Missed checks and warnings as workflow commands, which GitHub Actions turns into annotations."""
        return github_commands(self._subject(" "), self.missed, self.warnings)

    def _subject(self, separator: str) -> str:
        return separator.join(part for part in (self.model, self.quantizer, self.kind) if part)

    def __str__(self) -> str:
        return self.text()


def _check_text(check: GateCheck, width: int) -> str:
    first = f"  {'passed' if check.passed else 'missed'}  {check.title}: {check.outcome}"
    places = (wrap(f"{' ' * 10}{place}", width, indent=" " * 12) for place in check.places)
    return "\n".join([wrap(first, width, indent=" " * 10), *places])
