"""Rows of a diagnosis: causes, what was tried without success, and what was measured on the way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Annotated, ClassVar

from pt2qa._report.columns import column
from pt2qa._report.formats import decibel, number, share
from pt2qa._report.rows import Row

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
