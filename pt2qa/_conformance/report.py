"""The report of a conformance run: which properties hold for a quantizer, on which models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, get_args

from pt2qa._grouping import grouped
from pt2qa._report.base import Block, Listing, ModelReport, Report
from pt2qa._report.notes import kind_of
from pt2qa._report.prose import counted, listed, sections
from pt2qa._report.rows import column, derived, shown_columns
from pt2qa._report.storage import register
from pt2qa._report.table import draw

Verdict = Literal["passed", "failed", "does not apply", "skipped"]
UNSEEN: Final = "dtypes, axes, ranges and scales that the backend does not take"


@dataclass(frozen=True, slots=True)
class ConformanceRow:
    """The outcome of one property on one model.

    Args:
        quantizer: what was checked, so that tables of several quantizers can be joined.
        property: the property's name, such as ``spelling``.
        model: the model's name, such as ``conv_bn_relu``.
        outcome: ``passed``; ``failed``; ``does not apply``: the model has nothing that the property covers;
            ``skipped``: nothing is annotated, or an earlier step failed, and its row says why.
        why: the numbers, or the reason.
        seconds: how long it took; work that properties share counts for the first of them.
    """

    shown: ClassVar[tuple[str, ...]] = ("property", "model", "outcome", "why")

    quantizer: str
    property: Annotated[str, column(key=True, importance=0)]
    model: Annotated[str, column(key=True, importance=0, shrinks_to=16)]
    outcome: Annotated[Verdict, column(importance=5)]
    why: Annotated[str, column(importance=0, shrinks_to=16)]
    seconds: Annotated[float, column(extended=True)]


@dataclass(frozen=True, slots=True)
class ModelCoverage:
    """How much of one model is annotated.

    Args:
        model: its name.
        pattern: what it shows.
        ops: how many ops it has.
        annotated: how many of them are annotated to round a value.
    """

    model: Annotated[str, column(key=True)]
    pattern: str
    ops: int
    annotated: int


@dataclass(frozen=True, slots=True)
class _Count:
    """How often a property held."""

    property: Annotated[str, column(importance=0)]
    passed: Annotated[int, column(importance=3)]
    failed: Annotated[int, column(importance=0)]
    idle: Annotated[int, column("does not\napply", importance=1)]
    skipped: Annotated[int, column(importance=2)]


@register("conformance", schema=2)
@dataclass(frozen=True, slots=True, repr=False)
class ConformanceReport(ModelReport):
    """Which properties hold for a quantizer.

    ``print(report)`` shows how often each property held, then each failure with its reason;
    ``to_pandas(extended=True)`` adds the times.  Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: one per property and model, grouped by model.
        coverage: how much of each model is annotated.
        models: how many there are, those that were not run too; 0 if the file does not say.
        properties: ditto.
    """

    usual_measures: ClassVar[tuple[str, ...]] = ("outcome",)
    ties: ClassVar[str] = "model"
    model: ClassVar[str] = ""  # type: ignore[misc]  # there are several

    rows: tuple[ConformanceRow, ...]
    coverage: tuple[ModelCoverage, ...]
    models: Annotated[int, column(since=2)] = 0
    properties: Annotated[int, column(since=2)] = 0

    @derived(worse="smaller", judged=True)
    def passed(self) -> bool:
        """Whether nothing failed and something passed: a quantizer that annotates nothing has shown nothing."""
        outcomes = {row.outcome for row in self.rows}
        return "failed" not in outcomes and "passed" in outcomes

    @derived(judged=True)
    def failure_count(self) -> int:
        """How many rows failed."""
        return len(self.failures)

    @property
    def failures(self) -> tuple[ConformanceRow, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.outcome == "failed")

    @property
    def _without_spec(self) -> bool:
        return any(kind_of(note) == "no spec" for note in self.notes)

    @derived()
    def seconds(self) -> float:
        """How long the run took."""
        return sum(row.seconds for row in self.rows)

    def _headline(self) -> str:
        return f"<ConformanceReport of {self.quantizer}: {len(self.failures)} of {len(self.rows)} failed>"

    def _title(self, sort: str) -> str:
        models = len({row.model for row in self.rows})
        properties = len({row.property for row in self.rows})
        ran = f"{self.quantizer}: {counted(properties, 'property', 'properties')} on {counted(models, 'model')}"
        return f"{ran}, without a spec: {UNSEEN} are not seen" if self._without_spec else ran

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        """How often each property held, then the failures of each; ``limit`` applies to the failures."""
        names = dict.fromkeys(row.property for row in self.rows)
        rows = {name: [row for row in self.rows if row.property == name] for name in names}
        outcomes = {name: Counter(row.outcome for row in rows[name]) for name in names}
        ordered = sorted(names) if sort == "name" else list(names)
        counts = [_Count(name, *(outcomes[name][outcome] for outcome in get_args(Verdict))) for name in ordered]
        drawn, _ = draw(shown_columns(_Count), counts, width)
        return sections([drawn, *(_failures(name, rows[name], limit, width) for name in ordered)])

    def _ordered(self, sort: str) -> tuple[Sequence[ConformanceRow], str | None]:
        if sort == "worst":
            order = ("failed", "passed", "does not apply", "skipped")
            return sorted(self.rows, key=lambda row: order.index(row.outcome)), None
        return Report._ordered(self, "property" if sort == "name" else sort)

    def _after(self, limit: int | None) -> Iterator[Block]:
        bare = [each.model for each in self.coverage if not each.annotated]
        yield Listing(f"Not annotated at all ({len(bare)})", [", ".join(bare)] if bare else [])
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        failures = Counter(row.property for row in self.failures)
        outcomes = Counter(row.outcome for row in self.rows)
        if failures:
            properties = ", ".join(f"{name} ({count})" for name, count in failures.most_common())
            verdict = f"Fails in {counted(len(failures), 'property', 'properties')}: {properties}."
        elif outcomes["passed"]:
            verdict = self._without_failure()
        else:
            verdict = "Shows nothing: no property could be checked, because the quantizer annotates none of the models."
        return [
            verdict,
            f"Counts: {outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['does not apply']} do not "
            f"apply, {outcomes['skipped']} skipped, in {self.seconds:.0f} s.",
        ]

    def _without_failure(self) -> str:
        """That all ran and nothing failed; else how much of it ran."""
        models = len({row.model for row in self.rows})
        properties = len({row.property for row in self.rows})
        if (models, properties) == (self.models, self.properties):
            return f"Nothing failed, but {UNSEEN} are not seen." if self._without_spec else "Passes: nothing failed."
        some = "" if properties == self.properties else f"in the {_of(properties, self.properties)} properties, "
        return f"No failure {some}on the {_of(models, self.models)} models that ran."


def _of(ran: int, known: int) -> str:
    return f"{ran} of {known}" if known else str(ran)


def _failures(name: str, rows: list[ConformanceRow], limit: int | None, width: int) -> str:
    """The failures of one property; models that fail alike are grouped.  Empty without any."""
    groups = grouped((row.why, row.model) for row in rows if row.outcome == "failed")
    entries = [f"{', '.join(models)}: {why}" for why, models in groups.items()]
    return listed(f"FAILED {name} ({sum(map(len, groups.values()))})", entries, width, limit)
