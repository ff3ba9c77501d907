"""The error budget: the output noise by mechanism and place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pt2qa._decibels import decibels, summed
from pt2qa._grouping import grouped
from pt2qa._report.base import DataReport, Report, data_read
from pt2qa._report.charts import stacked
from pt2qa._report.prose import absent, counted, decibel, few, share
from pt2qa._report.rows import Column, Count, Row, column, derived
from pt2qa._report.storage import register
from pt2qa._report.sums import Sums

HALF: Final = 0.5
"""Share of the attributed noise above which one mechanism is the fault."""

BARS: Final = 15
"""Modules that the chart shows."""

_FAULTS: Final = {
    "range": "values exceed the range that their site can represent. Another observer, or calibration data with these "
    "values, helps; more bits do not.",
    "precision": "the quantization steps are too coarse. Per-channel scales, tighter ranges or more bits help; wider "
    "ranges do not.",
}

Mechanism = Literal[
    "activation rounding",
    "activation clamping",
    "weight rounding",
    "weight clamping",
    "bias",
    "nested graph not attributed",
]

UNATTRIBUTED: Final = "nested graph not attributed"
"""The noise of all quantization of a nested graph whose sites are not known."""


def share_of(noise: float, whole: float) -> float:
    return noise / whole if whole else nan if noise else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class BudgetRow(Row):
    """The part of the output noise that one mechanism of one site causes alone.

    Let F be the model's outputs as a function of the site's value x, all else as in the reference, ``clamp(x)`` the
    end of the range where x is more than half a step outside and x elsewhere, and ``round(x)`` the value that the
    quantized model has in its place, with sums over all outputs and batches::

        clamping: noise = sum((F(clamp(x)) - F(x))**2)
        rounding: noise = sum((F(round(x)) - F(clamp(x)))**2)
        bias:     noise = sum((F(round(x)) - F(x))**2)

    The noise of a nested graph that is not attributed is that of all its quantization together.

    For a site in series, behind another one with only ops between that pick or clip values, x is its value with that
    one on: behind a relu that is not fused, a site that rounds alike adds nothing.

    Args:
        name: of the op that produces the value (activation) or reads it (weight, bias).
        module: module path of that op.
        op: its type, such as ``conv2d``.
        kind: what is quantized.
        mechanism: what causes the noise.
        noise: squared output error, summed over the data; linear units, additive.
        noise_share: of the measured noise; 0..1, and more where errors cancel in the whole model.
        dtype: of the quantized values.
        site: index in ``pair.sites``.
        error: one sigma of the sampling error of ``noise_share``; 0 if nothing was sampled.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "op", "mechanism", "dtype", "noise_share", "error")

    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: Annotated[str, column(extended=True)]
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    kind: Annotated[Literal["activation", "weight", "bias"], column(importance=2)]
    mechanism: Annotated[Mechanism, column(key=True, importance=6)]
    noise: Annotated[float, column(importance=4)]
    noise_share: Annotated[float, column("noise\n%", show=share, importance=7)]
    dtype: Annotated[str, column(importance=2)]
    site: Annotated[int, column(extended=True)]
    error: Annotated[float, column("± %", show=share, importance=3, extended=True)]


@register("error-budget", schema=3, oldest=2, since={"input_ranges": 3})
@dataclass(frozen=True, slots=True, repr=False)
class ErrorBudget(DataReport):
    """The output noise of a quantized model, split by mechanism and place.

    What :func:`pt2qa.error_budget` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: one per site and mechanism, in graph order; a value that is quantized twice alike is one site.
        outputs: the outputs that were measured.
        method: ``projection`` or ``exact``.
        projections: random projections per batch, the maximum over batches; 0 for the exact method.
        signal: sum of the squared reference outputs over the data.
        noise: sum of the squared output errors of the fully quantized model, measured.
        sums: what :func:`pt2qa.merge` adds up.
    """

    counts_set_apart: ClassVar[bool] = False
    merges_in: ClassVar[str] = "pt2qa._diagnosis.budget"
    usual_measures: ClassVar[tuple[str, ...]] = ("noise",)
    ties: ClassVar[str] = "noise_share"
    one_run: ClassVar[tuple[str, ...]] = ("model", "quantizer", "method", "outputs")

    rows: tuple[BudgetRow, ...]
    outputs: tuple[str, ...]
    method: str
    projections: Count
    signal: float
    noise: float
    sums: Annotated[Sums, column(since=2)] = field(default_factory=dict, compare=False)

    @derived(unit="dB", judged=True)
    def sqnr(self) -> float:
        """Output SQNR in dB of the fully quantized model."""
        return inf if self.noise == 0.0 else decibels(self.signal, self.noise)

    @derived()
    def parts(self) -> float:
        """The noise of all rows that have a number."""
        return summed(row.noise for row in self._with_number)

    @property
    def _with_number(self) -> list[BudgetRow]:
        return [row for row in self.rows if not isnan(row.noise)]

    @derived(worse="")
    def interactions(self) -> float:
        """What is left of the measured noise: errors of several sites, or of one site's clamping and rounding, that
        add up or cancel.  Negative where they cancel.
        """
        return self.noise - self.parts

    @property
    def fault(self) -> Literal["range", "precision", ""]:
        """``range`` if clamping activations or weights causes more than half of :attr:`parts`, ``precision`` if another
        mechanism does, empty if none does.
        """
        name, noise = next(iter(self.by("mechanism").items()), ("", 0.0))
        if not noise > HALF * self.parts or name == UNATTRIBUTED:
            return ""
        return "range" if name in ("activation clamping", "weight clamping") else "precision"

    def by(self, name: Literal["mechanism", "module", "op", "kind", "name", "dtype"]) -> dict[str, float]:
        """The noise of the rows, added up by one of their columns, most first."""
        self.column(name)
        found = grouped((getattr(row, name), row.noise) for row in self._with_number)
        sums = {key: summed(noises) for key, noises in found.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """The measured noise by module, with its mechanisms, and by mechanism; each chart adds up to all of it."""
        if not self.noise:
            return []
        left = ("interactions", {"interactions": self.interactions})
        mechanisms = [(name, {name: noise}) for name, noise in self.by("mechanism").items()]
        parts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in self.by("module")}
        for row in self._with_number:
            parts[row.module][row.mechanism] += row.noise
        modules = [(name or "(top level)", noises) for name, noises in parts.items()]
        if rest := modules[BARS:]:
            added = {name: summed(noises.get(name, 0.0) for _, noises in rest) for name, _ in mechanisms}
            modules[BARS:] = [(counted(len(rest), "other module"), added)]
        about = "Share of the measured output noise; interactions are the rest."
        return [
            *self._stacked("Noise by module", f"{about} The noisiest module comes first.", [*modules, left]),
            *self._stacked("Noise by mechanism", about, [*mechanisms, left]),
        ]

    def _stacked(self, title: str, about: str, bars: list[tuple[str, dict[str, float]]]) -> list[dict[str, Any]]:
        """A bar for each entry, made of its noise by mechanism; both charts have the same series, and so colours."""
        series = [*(name for name in get_args(Mechanism) if name in self.by("mechanism")), "interactions"]
        rows = []
        for label, noises in bars:
            parts = [share_of(noises.get(name, 0.0), self.noise) for name in series]
            rows.append((label, parts, f"{share(summed(parts))} %"))
        return stacked(title, about, series, rows)

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        """The error is shown if something was sampled."""
        return replace(column, show=absent) if column.name == "error" and not self.projections else column

    def _headline(self) -> str:
        return f"<ErrorBudget of {self.subject()}: output SQNR {self.sqnr:.4g} dB>"

    def _title(self, sort: str) -> str:
        how = f"{self.method} method, {data_read(self.batches, self.samples)}"
        return f"Output SQNR {decibel(self.sqnr)} dB; error budget of {self.subject()}: {how}, {self._how(sort)}"

    def _lead(self) -> Sequence[str]:
        if self.noise == 0.0:
            return ["The outputs of both models are equal: there is no noise to attribute."]
        return [f"Of what sites cause alone: {self._by_mechanism()}.", *self._about_fault()]

    def in_short(self) -> str:
        """One sentence: the shares of the mechanisms, and the noisiest modules."""
        if self.noise == 0.0:
            return ""
        worst = [
            f"{name or 'the top'} {_percent(share_of(noise, self.parts))}" for name, noise in self.by("module").items()
        ][:3]
        return f"Error budget: {self._by_mechanism()}; most in {', '.join(worst)}."

    def _by_mechanism(self) -> str:
        """Shares of what adds up; and how much the whole differs from that, in words where it is more than half."""
        shares = [
            f"{name} {_percent(share_of(noise, self.parts))}" for name, noise in self.by("mechanism").items() if noise
        ]
        left = share_of(self.interactions, self.noise)
        if left < -HALF:
            whole = f"errors of several sites mostly cancel, to {_percent(1 / (1 - left))} of that"
        elif left > HALF:
            whole = f"errors of several sites add up, to {1 / max(1 - left, 1e-9):.1f} times that"
        else:
            whole = f"interactions {_percent(left)} of the whole"
        return ", ".join([*shares, whole])

    def _about_fault(self) -> Sequence[str]:
        if self.by("mechanism").get(UNATTRIBUTED, 0.0) > HALF * self.parts:
            return [
                "Most of the attributed noise is from nested graphs whose sites are unknown: analyse them separately."
            ]
        if not self.fault:
            return ["No mechanism causes more than half of the attributed noise."] if self.parts > 0 else []
        name, noise = next(iter(self.by("mechanism").items()))
        most = f"{name} causes {_percent(noise / self.parts)} of the attributed noise"
        return [f"{self.fault.capitalize()} fault: {most}; {_FAULTS[self.fault]}"]

    def _summary(self) -> Sequence[str]:
        silent = sum(row.noise == 0.0 for row in self.rows)
        missing = list(dict.fromkeys(row.name for row in self.rows if isnan(row.noise)))
        names = f"Not attributed, because each alone makes the output NaN or infinite: {few(missing, 3)}."
        counts = f"Counts: {silent} of {counted(len(self.rows), 'row')} without effect on the output."
        return [names, counts] if missing else [counts]


def _percent(part: float) -> str:
    return "<1 %" if 0 < part <= 0.005 else f"{100 * part:.0f} %"
