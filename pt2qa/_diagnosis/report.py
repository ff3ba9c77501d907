"""The report of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pt2qa._report.base import Block, DataReport, Grade, Listing, Report, Step, Table, data_read
from pt2qa._report.prose import counted, decibel, few, number, share
from pt2qa._report.rows import Count, Row, column, derived
from pt2qa._report.storage import register
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    from pt2qa.overrides.plan import OverridePlan

ADVICE = "with the advice"
"""The figure with all remedies, of which some are advice for the model or the quantizer."""


def signed(value: float) -> str:
    """A gain: ``+3.4``."""
    return number(value) if value in (inf, -inf) or isnan(value) else f"{value:+.3g}"


def between(low: float, high: float) -> str:
    """An interval: ``+1.2 to +3.4``."""
    return f"{signed(low)} to {signed(high)}"


@dataclass(frozen=True, slots=True, eq=False)
class CauseRow(Row):
    """One cause of the error, with the measured gain of its remedy.

    Args:
        rank: 1 is the first to act on.
        cause: stable id, such as ``narrow-calibration``.
        name: the op, site or module to look at; empty for the model as a whole.
        module: its module path.
        evidence: the numbers that point to it, and from which analysis.
        remedy: what to do: the exact call, or advice.
        gain: measured gain of the remedy alone: dB of the worst output, or in the unit of the user's metric; inf where
            the model is not finite without it.
        gain_in_sequence: the same after the remedies of the rows above.
        cost: share of the multiply-accumulates that the remedy takes out of int8, 0..1; 0 for a free one.
        sentence: the cause in words.
        others: other places it is at.
        source: the line of the user's code, ``net.py:12``; empty if not known.
        quality: dB of the worst output, or the user's metric, with this remedy and those of the rows above.
        how: how it was measured: ``quantized again``, ``simulated``, ``deployed``: quantized and lowered again, or
            ``compared``: from the outputs of two stages, of some samples, or of the kernels. The gain of the last two
            is in dB in any case.
        low, high: dB that another set of as many samples gives, in 95 of 100 cases, for the gain in sequence; nan where
            nothing tells: one sample, another instrument, a model that is not finite.
        output: the output whose gain it is, the worst one that the remedy helps; empty where there is one output.
    """

    rank: Annotated[int, column(worse="smaller", importance=0)]
    cause: Annotated[str, column(key=True, importance=0)]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    evidence: Annotated[str, column(importance=4, shrinks_to=24)]
    remedy: Annotated[str, column(importance=2, shrinks_to=24)]
    gain: Annotated[float, column(show=signed, importance=1)]
    gain_in_sequence: Annotated[float, column("gain in\nsequence", show=signed, importance=0)]
    cost: Annotated[float, column("cost\nMACs %", show=share, importance=3)]
    sentence: Annotated[str, column(extended=True)]
    others: Annotated[tuple[str, ...], column(extended=True)]
    source: Annotated[str, column(extended=True)]
    quality: Annotated[float, column(worse="smaller", extended=True)]
    how: Annotated[str, column(extended=True)]
    low: Annotated[float, column(show=signed, extended=True, since=3)] = nan
    high: Annotated[float, column(show=signed, extended=True, since=3)] = nan
    output: Annotated[str, column(extended=True, since=3)] = ""

    shown: ClassVar[tuple[str, ...]] = ("rank", "cause", "name", "gain", "gain_in_sequence", "cost")


@dataclass(frozen=True, slots=True, eq=False)
class TriedRow(Row):
    """A remedy that is not recommended.

    Args:
        cause: what it would have been.
        name: where.
        remedy: what was tried.
        gain: what it gave alone; nan if it was not measured.
        reason: why it is not recommended.
    """

    cause: Annotated[str, column(key=True, importance=0)]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    remedy: Annotated[str, column(key=True, importance=2, shrinks_to=24)]
    gain: Annotated[float, column(worse="smaller", show=signed, importance=0)]
    reason: Annotated[str, column(importance=1, shrinks_to=24)]


@dataclass(frozen=True, slots=True, eq=False)
class FigureRow(Row):
    """Quality of a configuration on the evaluation data.

    Args:
        name: ``float``, where there is a metric; ``now``; ``after``: the new pair; ``with the advice``: with all
            remedies, simulated, where some change the model or the quantizer; ``deployed``: the backend's program, and
            that of the new pair; or a reference: ``ranges fitted to the data``.
        value: the user's metric, or the SQNR of the worst output in dB; nan if it was not measured.
        output: the worst output.
        sqnr: its SQNR in dB.
        sample: index of the sample with the lowest SQNR; -1 if outputs have no axis of samples.
        sample_sqnr: its SQNR in dB.
        labels: share of samples with the float model's label, 0..1; nan if no output holds class scores.
        samples: how many samples.
    """

    name: Annotated[str, column("configuration", key=True, importance=0)]
    value: Annotated[float, column(worse="smaller", importance=0)]
    output: Annotated[str, column("worst output", importance=3)]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", show=decibel, importance=0)]
    sample: Annotated[int, column("worst\nsample", importance=2)]
    sample_sqnr: Annotated[float, column("its SQNR\ndB", unit="dB", show=decibel, importance=1)]
    labels: Annotated[float, column("same label\n%", worse="smaller", show=share, importance=1)] = nan
    samples: Annotated[int, column(extended=True)] = 0


@dataclass(frozen=True, slots=True)
class AsideRow:
    """An error that :func:`pt2qa.check` found, which need not cost the outputs anything.

    Args:
        rule: id of its rule.
        name: where.
        why: what is wrong.
        fix: what to do.
    """

    rule: Annotated[str, column(key=True, importance=0)]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    why: Annotated[str, column(importance=0, shrinks_to=24)]
    fix: Annotated[str, column(importance=1, shrinks_to=24)]


@register("diagnosis", schema=3, oldest=1, since={"set_apart": 2, "input_ranges": 2})
@dataclass(frozen=True, repr=False)
class Diagnosis(DataReport):
    """What causes the error of a quantized model, and what was measured to help.

    What :func:`pt2qa.diagnose` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: the causes, in the order to act on them.
        tried: remedies that are not recommended.
        figures: the quality now, with all remedies, and with ranges that fit the data.
        asides: the errors that :func:`pt2qa.check` found.
        verdict: the diagnosis in one sentence, after problems of the data.
        next_command: what to type or call next; empty if there is nothing to do.
        unit: ``dB``, or the name of the user's metric.
        target: the target in words; empty without one.
        met: 1 if the model reaches the target now, 0 if not, -1 without a target.
        budget: the error budget in a sentence: the shares of the mechanisms, and the noisiest modules.
        plan_json: the override plan of all remedies that are edits; empty without any.
        code: what quantizes the model with all remedies in an export flow without pt2qa; empty if none can be applied.
        code_verified: the result of executing it: ``equal``, ``equal, with ...``, ``differs: ...`` or ``not run: ...``.
        forwards: runs of the model on a batch that it took.
        quantizations: how often the model was quantized again.
        story: the quality from float to the kernels, in the user's own measure: ``int8 12.3 dB -> with the remedy 24.1
            dB``.
    """

    counts_set_apart: ClassVar[bool] = False
    usual_measures: ClassVar[tuple[str, ...]] = ("figures.sqnr",)
    ties: ClassVar[str] = "rank"
    instead_of_merging: ClassVar[str] = (
        "It is searched. Merge its evidence, pt2qa.merge([each.reports['budget'] for each in diagnoses]), and diagnose "
        "again on all batches: pt2qa.diagnose(pair, batches), within pt2qa.distributed() if processes share them."
    )
    titles: ClassVar[Mapping[str, str]] = {
        "rows": "Causes",
        "figures": "Measured",
        "tried": "Tried, and not recommended",
        "asides": "Errors found by pt2qa.check",
    }

    rows: tuple[CauseRow, ...]
    tried: tuple[TriedRow, ...]
    figures: tuple[FigureRow, ...]
    asides: tuple[AsideRow, ...]
    verdict: str
    next_command: str
    unit: str
    target: str
    met: Annotated[int, column(worse="smaller")]
    budget: str
    plan_json: str
    code: str
    code_verified: str
    forwards: Count
    quantizations: Count
    story: Annotated[str, column(since=3)] = ""

    @derived(unit="dB", judged=True)
    def sqnr(self) -> float:
        """SQNR in dB of the worst output now."""
        return self._figure("now", "sqnr")

    @derived(unit="dB", judged=True)
    def sqnr_after(self) -> float:
        """The same of :attr:`pair`, or with the remedies that are advice where it needs no other."""
        names = [row.name for row in self.figures]
        return next((self._figure(name, "sqnr") for name in ("after", ADVICE) if name in names), self.sqnr)

    @property
    def plan(self) -> OverridePlan:
        """The remedies that are edits, for :func:`pt2qa.quantize`'s ``overrides``.

        Raises:
            ReportError: no remedy is an edit.
        """
        from pt2qa.overrides.plan import OverridePlan

        if not self.plan_json:
            raise ReportError("no remedy of this diagnosis is an edit, so it has no plan; its rows name the remedies.")
        return OverridePlan.from_json(self.plan_json)

    @property
    def pair(self) -> Any:
        """The :class:`pt2qa.QuantizedPair` with all remedies that need no change of the model.

        Raises:
            ReportError: the report was loaded from a file, or there is no such remedy.
        """
        pair = getattr(self, "_pair", None)
        if pair is None:
            raise ReportError(
                "this diagnosis has no pair: it was loaded from a file, or found nothing to apply. Run pt2qa.diagnose."
            )
        return pair

    @property
    def reports(self) -> Mapping[str, Report]:
        """The reports of the analyses that it used, by name; empty if it was loaded from a file."""
        return getattr(self, "_reports", {})

    @property
    def search_target(self) -> float | None:
        """What :func:`pt2qa.reconfigure` should reach, if that is what to call next and the report was not loaded."""
        return getattr(self, "_search_target", None)

    @property
    def treatments(self) -> tuple[Any, ...]:
        """What each row changes, in order; empty if it was loaded from a file."""
        return getattr(self, "_treatments", ())

    def with_evidence(
        self,
        pair: Any,
        reports: Mapping[str, Report],
        search_target: float | None = None,
        treatments: Sequence[Any] = (),
    ) -> Diagnosis:
        """The same report with the new pair, the other reports and the treatments attached; files do not store them."""
        object.__setattr__(self, "_treatments", tuple(treatments))
        object.__setattr__(self, "_search_target", search_target)
        object.__setattr__(self, "_pair", pair)
        object.__setattr__(self, "_reports", dict(reports))
        return self

    def grade(self) -> Grade:
        """Bad where there is something to do, or a target is missed."""
        if self.rows or isnan(self._figure("now", "value")) or self.met == 0:
            return "bad"
        return "warning" if self.asides or self.next_command or not self.health.is_sound else "good"

    def _figure(self, name: str, field: str) -> float:
        return next((getattr(row, field) for row in self.figures if row.name == name), float("nan"))

    def _headline(self) -> str:
        return f"<Diagnosis of {self.model}, {self.quantizer}: {self.verdict}>"

    def _title(self, sort: str) -> str:
        read = data_read(self.batches, self.samples)
        return f"Diagnosis of {self.model}, quantized by {self.quantizer}; {read}"

    def _lead(self) -> Sequence[str]:
        return [self.verdict, *([f"{self.story}."] if self.story else [])]

    def _ordered(self, sort: str) -> tuple[Sequence[CauseRow], str | None]:
        return (self.rows, None) if sort == "worst" else Report._ordered(self, sort)

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        return self._table(sort, limit, width) if self.rows else ""

    def _after(self, limit: int | None) -> Iterator[Block]:
        for row in self.rows:
            yield "\n".join(explained(row, self.unit))
        yield Table(self.shown("figures"), self.figures, "Measured")
        yield Listing(f"Tried, and not recommended ({len(self.tried)})", list(_tried(self.tried, self.unit)))
        errors = [f"{row.rule}{f', {row.name}' if row.name else ''}: {row.why} -> {row.fix}" for row in self.asides]
        yield Listing(f"Errors found by pt2qa.check ({len(errors)})", errors)
        yield from self._set_apart()
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        code = f"Code with all remedies, executed in a plain export flow: {self.code_verified}."
        runs = counted(self.forwards, "model run on a batch", "model runs on a batch")
        took = f"Cost: {runs}, {counted(self.quantizations, 'quantization')}."
        return [
            *([self.budget] if self.budget else []),
            *([code] if self.code else []),
            took,
            *([f"Next: {self.next_command}"] if self.next_command else []),
        ]

    def lines(self) -> Sequence[str]:
        return [*self._lead(), *self._data()]

    def advice(self) -> tuple[Step, ...]:
        return tuple(_step(row, self.unit) for row in self.rows)


def explained(row: CauseRow, unit: str) -> list[str]:
    step = _step(row, unit)
    where = f" at {step.name}{f' ({step.source})' if step.source else ''}" if step.name else ""
    what, evidence = step.why
    return [
        f"{row.rank}. {step.what}{where}: {what}",
        f"   Evidence: {evidence}",
        f"   Remedy: {step.remedy}",
        f"   Measured ({row.how}): {step.gain}.",
    ]


def _step(row: CauseRow, unit: str) -> Step:
    others = f" Also at {few(row.others, 3)}." if row.others else ""
    unit = "dB" if row.how in ("deployed", "compared") else unit
    gains = _gained(row.gain, unit)
    if not isnan(row.gain_in_sequence) and row.rank > 1:
        gains += f" alone, {_gained(row.gain_in_sequence, unit)} after the remedies above"
    if isfinite(row.low):
        at = f" at {row.output}" if row.output else ""
        gains += f"{at} ({between(row.low, row.high)} dB on samples like these)"
    cost = f", for {share(row.cost)} % of the multiply-accumulates" if row.cost else ", for free"
    why = (f"{row.sentence}.{others}", f"{row.evidence}.")
    gains += "" if isnan(row.gain) else cost
    return Step(row.cause, row.name, row.source, why, row.remedy, gains)


def _gained(gain: float, unit: str) -> str:
    return "not measured" if isnan(gain) else f"{signed(gain)} {unit}"


def _tried(rows: Sequence[TriedRow], unit: str) -> Iterator[str]:
    """A line for each remedy that was measured, then one for each reason why others were not."""
    missing: dict[str, list[str]] = {}
    for row in rows:
        if isnan(row.gain):
            missing.setdefault(row.reason, []).append(f"{_at(row)}: {row.remedy}")
        else:
            yield f"{_at(row)}: {row.remedy}: {_gained(row.gain, unit)}; {row.reason}"
    for reason, remedies in missing.items():
        yield f"{reason}: {'; '.join(remedies)}"


def _at(row: TriedRow) -> str:
    return f"{row.cause} at {row.name}" if row.name else row.cause
