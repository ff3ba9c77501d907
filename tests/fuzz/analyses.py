"""Every analysis of one model, and what must hold of its numbers: each is computed again from the two graphs.

An error of pt2qa's own is a refusal, which is counted.  Any other exception, a number that is not the recomputed one
and a request to file a bug are failures.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

import pt2qa
from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator.simulator import tensors_equal
from pt2qa.errors import Pt2qaError, SimulationError
from tests.fuzz.grammar import NESTED, Genome, batch_of, write
from tests.fuzz.quantizer import RandomQuantizer
from tests.merge.equal import differences
from tests.recomputation import Recomputation, Recording, by_handle, is_quantization, of_constants
from tests.sensitivity.brute_force import noises
from tests.soak.fuzz import use

Batch = tuple[Tensor, ...]
DB = 2e-3
"""How far two SQNRs may be apart, in dB; above 100 dB the rounding of sums shows."""


class Wrong(AssertionError):
    """A number or a text that is not what it must be."""


@dataclass
class Subject:
    """A pair and what it was made of.

    ``moved``: whether quantizing moved torch's random state; ``nested``: whether there are nested graphs; ``reports``:
    of the analyses so far.
    """

    genome: Genome
    capture: pt2qa.Capture
    pair: pt2qa.QuantizedPair
    batches: list[Batch]
    moved: bool
    nested: bool
    reports: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by


@dataclass(frozen=True)
class Outcome:
    """What became of a genome.

    Args:
        failures: by stage, what went wrong: a line that stays the same when the model gets smaller, and the traceback.
        refusals: what pt2qa refused, and at which stage.
        counts: numbers that were compared.
    """

    failures: dict[str, tuple[str, str]]
    refusals: dict[str, str]
    counts: dict[str, int]


def analyse(genome: Genome, only: Sequence[str] = ()) -> Outcome:
    """Makes the model, quantizes it, and runs all stages, or only some."""
    outcome = Outcome({}, {}, {})
    subject = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _noted(outcome, "quantize"):
            subject = quantized(genome)
        if subject is not None:
            outcome.counts["pairs"] = 1
            subject.counts = outcome.counts
            for name, stage in STAGES.items():
                if (name in only) if only else applies(name, genome):
                    with _noted(outcome, name):
                        _run(subject, stage)
            if subject.nested:
                failures = outcome.failures.items()
                outcome.failures.update({name: (f"nested graphs: {line}", trace) for name, (line, trace) in failures})
    return outcome


def quantized(genome: Genome) -> Subject:
    """The pair of a genome, and the batches that are analysed."""
    written = write(genome)
    capture = pt2qa.capture(written.model, written.example)
    calibration = [batch_of(genome, "normal", number) for number in range(2)]
    before = torch.get_rng_state()
    pair = pt2qa.quantize(capture, quantizer_of(genome), calibration, progress=False)
    moved = not torch.equal(before, torch.get_rng_state())
    batches = [batch_of(genome, kind, 10 + number) for number, kind in enumerate(genome.batches)]
    return Subject(genome, capture, pair, batches, moved, bool(set(NESTED) & set(written.ops)))


def quantizer_of(genome: Genome) -> Any:
    if genome.quantizer.startswith("random"):
        return RandomQuantizer(genome.seed, whole_ops=genome.quantizer == "random_ops", plain=genome.plain)
    name, _, mode = genome.quantizer.partition(":")
    return pt2qa.quantizer(name, mode=mode) if mode else name


def applies(stage: str, genome: Genome) -> bool:
    """Whether a model is put through a stage: the costly ones take every so-manieth."""
    return genome.seed % EVERY.get(stage, 1) == 0


def _run(subject: Subject, stage: Callable[[Subject], None]) -> None:
    """A stage, which must leave the batches and torch's random state as they are."""
    state, kept = torch.get_rng_state(), [tuple(value.clone() for value in batch) for batch in subject.batches]
    stage(subject)
    if not torch.equal(state, torch.get_rng_state()):
        raise Wrong("torch's random state was moved")
    if not tensors_equal(kept, subject.batches):
        raise Wrong("a batch was changed")


@contextlib.contextmanager
def _noted(outcome: Outcome, stage: str) -> Iterator[None]:
    try:
        yield
    except Pt2qaError as error:
        text = str(error)
        if type(error) is SimulationError or "file a bug" in text:
            outcome.failures[stage] = (f"{type(error).__name__}: {_plain(text)}", traceback.format_exc())
        else:
            outcome.refusals[stage] = f"{type(error).__name__}: {_plain(text)}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(f.filename).stem}.{f.name}" for f in frames if "/pt2qa/" in f.filename][-1:]
        outcome.failures[stage] = (
            " ".join([f"{type(error).__name__}: {_plain(str(error))}", *own]),
            traceback.format_exc(),
        )


def _plain(text: str) -> str:
    """A message without what differs from model to model."""
    line = next(iter(text.strip().splitlines()), "")
    return re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'|v\d+|m\d+|\b[a-z_0-9.]+/[a-z_0-9]+\b", "#", line)[:120]


# -- what must hold ----------------------------------------------------------------------------------------------------


def _same(what: str, reported: float, expected: float, *, rel: float = 1e-4, near: float = 0.0) -> None:
    both_nan = math.isnan(reported) and math.isnan(expected)
    if not both_nan and not math.isclose(reported, expected, rel_tol=rel, abs_tol=near):
        raise Wrong(f"{what}: {reported}, computed {expected}")


def _same_db(what: str, reported: float, signal: float, noise: float) -> None:
    expected = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal > 0 else math.nan
    if abs(expected) > 130 and abs(reported) > 130:  # the rounding of float32 itself
        return
    _same(f"{what}, dB", reported, expected, rel=0, near=DB)


def _flat(graph: GraphModule, batch: Batch) -> list[Any]:
    with torch.no_grad():
        return list(pytree.tree_leaves(graph(*(value.clone() for value in batch))))


def counted_batches(report: Any, batches: Sequence[Batch]) -> list[Batch]:
    """Those that the rows are about."""
    apart = {each.batch for each in report.set_apart}
    left = [batch for number, batch in enumerate(batches) if number not in apart]
    return left or list(batches)


def random_state(subject: Subject) -> None:
    if subject.moved:
        raise Wrong("quantize moved torch's random state")


def simulator(subject: Subject) -> None:
    """All sites on is the converted graph, bit for bit; all off is the reference, but for a folded batch norm."""
    pair = subject.pair
    for batch in subject.batches:
        values = pair.values(batch)
        expected, every = _flat(pair.quantized, batch), {site.index for site in pair.sites}
        for on in (True, every):
            if not tensors_equal(pytree.tree_leaves(pair.simulator.run(values, on=on)), expected):
                raise Wrong(f"the simulator is not the converted graph, on={on is True}")
        off = pytree.tree_leaves(pair.simulator.run(values, on=False))
        if not tensors_equal(off, _flat(pair.reference, batch)) and not pair.verify(batch):
            subject.count("references that agree to rounding")
        pair.verify(batch)


def nothing_lost(subject: Subject) -> None:
    """Each op of the capture is a step, an input or explained, and each quantized one has a row."""
    pair, names = subject.pair, subject.capture.names
    steps = {step.handle for step in pair.program.steps if step.site is None}
    explained = {unpaired.handle for unpaired in pair.pairing.unpaired}
    other = {handle for handle, name in names.items() if name.name in set(subject.capture.unanalysed)}
    constant = (node.meta.get("custom", {}) for node in of_constants(pair.quantized))  # computed once
    other |= {custom["numeric_debug_handle"] for custom in constant if "numeric_debug_handle" in custom}
    missing = names.keys() - (steps | explained | set(pair.program.input_handles) | other)
    if missing:
        raise Wrong(f"lost: {sorted(names[handle].name for handle in missing)}")
    if both := {paired.handle for paired in pair.pairing.pairs} & explained:
        raise Wrong(f"paired and unpaired: {sorted(both)}")


def layers(subject: Subject) -> None:
    report = pt2qa.compare_layers(subject.pair, subject.batches, progress=False)
    subject.reports["layers"] = report
    if not report.rows:
        raise Wrong("no rows")
    batches = counted_batches(report, subject.batches)
    values = [Recomputation(subject.pair, *batch) for batch in batches]
    finite = len(report.set_apart) < len(subject.batches)
    seen: dict[tuple[Any, ...], int] = {}
    for row in report.rows:
        key = (row.handle, row.observed_at, row.dtype, str(row.scale), str(row.zero_point))
        nth = seen[key] = seen.get(key, -1) + 1
        if finite and not any(words in row.note for words in ("not compared", "shape", "not written")):
            _check_layer(subject, row, [each.of(row, nth) for each in values])


def _check_layer(subject: Subject, row: Any, found: Sequence[Any]) -> None:
    reference, quantized, isolated, rounded = (
        torch.cat([_numbers(each) for each in column]) for column in zip(*found, strict=True)
    )
    known = (reference.isfinite() & quantized.isfinite()) | (reference != quantized) & ~(
        reference.isnan() & quantized.isnan()
    )
    if not known.all():
        reference, quantized, isolated, rounded = (x[known] for x in (reference, quantized, isolated, rounded))
    what = f"layers {row.op} {row.observed_at}"
    if not reference.numel():
        if not math.isnan(row.sqnr):
            raise Wrong(f"{what}: {row.sqnr} of no elements")
        return
    signal, error = float(reference @ reference), reference - quantized
    _same_db(f"{what} sqnr", row.sqnr, signal, float(error @ error))
    _same(f"{what} mse", row.mse, float(error.square().mean()), near=1e-14 * signal)
    _same(f"{what} l1", row.l1, float(error.abs().mean()), near=1e-7 * math.sqrt(signal))
    _same(f"{what} atol", row.atol, float(error.abs().max()), near=1e-12)
    if row.scale > 0:
        _same(f"{what} max_lsb", row.max_lsb, float(error.abs().max()) / row.scale, near=1e-6)
    for side, x in (("ref", reference), ("quant", quantized)):
        _same(f"{what} {side}_min", getattr(row, f"{side}_min"), float(x.min()))
        _same(f"{what} {side}_max", getattr(row, f"{side}_max"), float(x.max()))
        _same(f"{what} {side}_mean", getattr(row, f"{side}_mean"), float(x.mean()), near=1e-5 * float(x.abs().mean()))
    for name, x in (("isolated_sqnr", isolated), ("rounding_sqnr", rounded)):
        reported = getattr(row, name)
        measured = name == "isolated_sqnr" or row.observed_at == "dq"
        if math.isnan(reported) and measured and signal > 0 and bool(x.isfinite().all()):
            raise Wrong(f"{what} {name}: nan, {row.note!r}")
        if not math.isnan(reported):
            error = reference - x
            _same_db(f"{what} {name}", reported, signal, float(error @ error))
    subject.count("layer rows")


def _numbers(x: Tensor) -> Tensor:
    """Flat and in float64; a complex number is two."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).detach().double().reshape(-1)


def weights(subject: Subject) -> None:
    """Every weight's row has the error of a constant that its op reads."""
    pair = subject.pair
    report = subject.reports["weights"] = pt2qa.compare_weights(pair)
    ours, floats = by_handle(pair.quantized), by_handle(pair.reference)
    batch = batch_of(subject.genome, "normal", 0)
    values, references = Recording.of(pair.quantized, *batch), Recording.of(pair.reference, *batch)
    for row in report.rows:
        if row.handle not in ours or row.handle not in floats:
            continue
        pairs = [
            (references[mine].double().reshape(-1), values[theirs].double().reshape(-1))
            for mine, theirs in zip(floats[row.handle].all_input_nodes, ours[row.handle].all_input_nodes, strict=False)
            if isinstance(references[mine], Tensor) and tuple(references[mine].shape) == tuple(row.shape)
        ]
        pairs = [(a, b) for a, b in pairs if not a.numel() or math.isclose(float(a.max()), row.ref_max, rel_tol=1e-6)]
        problems = []
        for mine, theirs in pairs:
            try:
                error = mine - theirs
                _same_db(f"weights {row.attr} sqnr", row.sqnr, float(mine @ mine), float(error @ error))
                _same(f"weights {row.attr} atol", row.atol, float(error.abs().max()), near=1e-12)
                _same(f"weights {row.attr} quant_min", row.quant_min, float(theirs.min()), near=1e-12)
                break
            except Wrong as problem:
                problems.append(problem)
        else:
            if problems and row.shape and math.prod(row.shape):
                raise problems[0]
        subject.count("weights")


def exact(subject: Subject) -> None:
    report = pt2qa.sensitivity(subject.pair, subject.batches, method="exact", progress=False)
    subject.reports["exact"] = report
    batches = [batch for n, batch in enumerate(subject.batches) if n not in {each.batch for each in report.set_apart}]
    if not batches:
        return
    _check_output_noise(subject, report, batches)
    if len(report.rows) != report.planned:
        raise Wrong(f"{len(report.rows)} rows of {report.planned}")
    of_values = (node for node in of_constants(subject.pair.quantized) if ".dequantize" not in str(node.target))
    if subject.nested or any(is_quantization(read) for node in of_values for read in node.all_input_nodes):
        return  # the brute force switches what the graph itself rounds, where an op reads it as it is
    expected = noises(subject.pair, batches)
    for row, noise in zip(report.rows, expected, strict=True):
        near = 1e-13 * report.signal + 1e-6 * math.sqrt(noise * report.signal)  # the rounding of another kernel
        _same(f"exact {row.kind} {row.op}", row.noise, noise, rel=1e-4, near=near)
        if row.noise > 1e-12 * report.signal > 0:
            _same_db(f"exact value of {row.op}", row.value, report.signal, row.noise)
        subject.count("exact sensitivities")
    if [row.rank for row in sorted(report.rows, key=lambda row: -row.noise)] != list(range(1, len(expected) + 1)):
        by_rank = [row.noise for row in sorted(report.rows, key=lambda row: row.rank)]
        if by_rank != sorted(by_rank, reverse=True):
            raise Wrong(f"the ranks of exact sensitivities are not in the order of their noise: {by_rank}")


def _check_output_noise(subject: Subject, report: Any, batches: Sequence[Batch]) -> None:
    signal = noise = 0.0
    for batch in batches:
        for mine, theirs in zip(
            *(_flat(g, batch) for g in (subject.pair.reference, subject.pair.quantized)), strict=True
        ):
            if isinstance(mine, Tensor) and mine.is_floating_point():
                known = mine.isfinite()  # equal infinities are left out
                mine, theirs = mine[known].double(), theirs[known].double()
                signal += float(mine.square().sum())
                noise += float((mine - theirs).square().sum())
    _same(f"{type(report).__name__} signal", report.signal, signal, rel=1e-5)
    near = 1e-13 * signal + 1e-6 * math.sqrt(noise * signal)  # the rounding of another kernel
    _same(f"{type(report).__name__} noise", report.noise, noise, rel=1e-4, near=near)


def projection(subject: Subject) -> None:
    report = pt2qa.sensitivity(subject.pair, subject.batches, method="projection", progress=False)
    subject.reports["projection"] = report
    apart = {each.batch for each in report.set_apart}
    batches = [batch for number, batch in enumerate(subject.batches) if number not in apart]
    if batches:
        _check_output_noise(subject, report, batches)
    without = [row for row in report.rows if batches and not row.noise >= 0]
    if without:  # right where the site alone gives the model no number
        alone = pt2qa.sensitivity(subject.pair, batches, method="exact", progress=False)
        known = {row.site: row.noise for row in alone.rows}
        for row in without:
            _same(f"projection: the noise of {row.op}", row.noise, known[row.site])


def automatic(subject: Subject) -> None:
    subject.reports["auto"] = pt2qa.sensitivity(subject.pair, subject.batches, group="region", progress=False)


def budget(subject: Subject) -> None:
    report = subject.reports["budget"] = pt2qa.error_budget(subject.pair, subject.batches, progress=False)
    apart = {each.batch for each in report.set_apart}
    batches = [batch for number, batch in enumerate(subject.batches) if number not in apart]
    if batches:
        _check_output_noise(subject, report, batches)
        _same("budget parts", report.parts + report.interactions, report.noise, near=1e-9 * report.noise)


def bad_cases(subject: Subject) -> None:
    """The worst sample of all, by the SQNR of each output."""
    report = pt2qa.find_bad_cases(subject.pair, subject.batches, k=2, metric=["sqnr", "cosine", "kl"], progress=False)
    subject.reports["bad cases"] = report
    flat = [
        [_flat(graph, batch) for graph in (subject.pair.reference, subject.pair.quantized)] for batch in subject.batches
    ]
    for row in report.rows:
        if row.metric != "sqnr" or math.isnan(row.value):
            continue
        mine, theirs = flat[row.batch]
        problems = []
        for a, b in zip(mine, theirs, strict=True):
            if not isinstance(a, Tensor) or (row.sample >= 0 and (not a.dim() or row.sample >= len(a))):
                continue
            a, b = ((x[row.sample] if row.sample >= 0 else x).double().reshape(-1) for x in (a, b))
            known = a.isfinite() & b.isfinite()
            try:
                error = (a - b)[known]
                _same_db("bad case", row.value, float(a[known] @ a[known]), float(error @ error))
                break
            except Wrong as problem:
                problems.append(problem)
        else:
            raise problems[0] if problems else Wrong(f"no output has sample {row.sample}")
        subject.count("bad cases")


def profiles(subject: Subject) -> None:
    for side, graph in (("reference", subject.pair.reference), ("quantized", subject.pair.quantized)):
        report = subject.reports[f"profile {side}"] = pt2qa.profile(
            subject.pair, subject.batches, side=side, per_channel=subject.genome.seed % 2 == 0, progress=False
        )
        nodes = by_handle(graph)
        values = [Recording.of(graph, *batch) for batch in subject.batches]
        for row in report.rows:
            if row.role != "output" or row.handle not in nodes or row.scheme:
                continue
            found = [each[nodes[row.handle]] for each in values]
            if all(isinstance(each, Tensor) and each.dtype != torch.bool for each in found):
                _check_profile(subject, f"profile {side} of {row.op}", row, found)


def _check_profile(subject: Subject, what: str, row: Any, found: Sequence[Tensor]) -> None:
    x = torch.cat([_numbers(each) for each in found])
    _same(f"{what} count", row.count, x.numel())
    _same(f"{what} nans", row.nans, int(x.isnan().sum()))
    _same(f"{what} infs", row.infs, int(x.isinf().sum()))
    x = x[x.isfinite()]
    if x.numel():
        size = float(x.abs().max())
        _same(f"{what} min", row.min, float(x.min()))
        _same(f"{what} max", row.max, float(x.max()))
        _same(f"{what} mean", row.mean, float(x.mean()), near=1e-6 * size)
        _same(f"{what} variance", row.variance, float(x.var(correction=0)), rel=1e-3, near=1e-11 * size * size)
    subject.count("profile rows")


def checked(subject: Subject) -> None:
    report = subject.reports["check"] = pt2qa.check(subject.pair, batches=subject.batches, progress=False)
    if failed := [rule for rule in report.rules if rule.outcome == "failed"]:
        raise Wrong(f"rule {failed[0].rule} failed: {_plain(failed[0].reason)}")


def annotated(subject: Subject) -> None:
    subject.reports["annotations"] = pt2qa.annotations(subject.pair)


def two_graphs(subject: Subject) -> None:
    subject.reports["graphs"] = pt2qa.compare_graphs(
        subject.pair.reference, subject.pair.quantized, subject.batches, progress=False
    )


def as_deployed(subject: Subject) -> None:
    pair = subject.pair.as_deployed()
    if pair is not subject.pair:
        subject.reports["as deployed"] = pt2qa.compare_layers(pair, subject.batches, progress=False)


def diagnosed(subject: Subject) -> None:
    subject.reports["diagnosis"] = pt2qa.diagnose(subject.pair, subject.batches, progress=False)


def reconfigured(subject: Subject) -> None:
    subject.reports["reconfiguration"] = pt2qa.reconfigure(
        subject.pair, subject.batches, target=pt2qa.Target(30.0), progress=False
    )


def repaired(subject: Subject) -> None:
    subject.reports["repair"] = pt2qa.repair(subject.pair, subject.batches, progress=False)


def deployed(subject: Subject) -> None:
    if not subject.genome.quantizer.startswith("random"):
        subject.reports["deployed"] = pt2qa.compare_deployed(subject.pair, subject.batches, progress=False)


MERGED: dict[str, Callable[[pt2qa.QuantizedPair, Sequence[Batch]], Any]] = {
    "layers": lambda pair, batches: pt2qa.compare_layers(pair, batches, progress=False),
    "exact": lambda pair, batches: pt2qa.sensitivity(pair, batches, method="exact", progress=False),
    "projection": lambda pair, batches: pt2qa.sensitivity(pair, batches, method="projection", progress=False),
    "bad cases": lambda pair, batches: pt2qa.find_bad_cases(
        pair, batches, k=2, metric=["sqnr", "cosine", "kl"], progress=False
    ),
    "profile reference": lambda pair, batches: pt2qa.profile(pair, batches, side="reference", progress=False),
}


def merged(subject: Subject) -> None:
    """Reports of parts of the data give that of all of it."""
    if len(subject.batches) < 2:
        return
    for name, run in MERGED.items():
        try:
            whole = run(subject.pair, subject.batches)
            parts = [run(subject.pair, subject.batches[:1]), run(subject.pair, subject.batches[1:])]
        except Pt2qaError:
            continue
        vectors = {each.projections for report in (whole, *parts) for each in getattr(report, "data", ())}
        if name == "projection" and len(vectors) > 1:
            continue  # the number of vectors is drawn until the ranking of what was read is stable
        together = pt2qa.merge(parts)
        wrong = differences(together, whole)
        if wrong and not any("nan" in each or "inf" in each for each in wrong) and _only_tiny(wrong):
            continue
        if wrong:
            raise Wrong(f"merged {name}: {wrong[0]}, and {len(wrong) - 1} more")
        subject.count("merged")


def _only_tiny(wrong: Sequence[str]) -> bool:
    """Whether all differences are of the last bits of sums that nearly cancel."""
    numbers = [re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", each.rpartition(": ")[2]) for each in wrong]
    return all(len(each) == 2 and math.isclose(*map(float, each), rel_tol=1e-5) for each in numbers)


def views(subject: Subject) -> None:
    """Each report is read as it was saved, and can be looked at in every way."""
    chance = random.Random(subject.genome.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name, report in subject.reports.items():
            path = Path(folder) / "report.safetensors"
            report.save(path)
            loaded = pt2qa.load(path)
            if str(loaded) != str(report) or loaded.text(limit=None) != report.text(limit=None):
                raise Wrong(f"the text of {name} is not that of the file")
            if where := _unlike(asdict(loaded), asdict(report), name):
                raise Wrong(f"not read as it was saved: {where}")
            if "nothing stands out" in str(report).lower() and getattr(report, "set_apart", ()):
                subject.count("nothing stands out, with batches set apart")
            use(report, report, chance, every=subject.genome.seed % 7 == 0)
            subject.count("reports saved")


def _unlike(one: Any, other: Any, where: str) -> str:
    """Where two reports differ; nan equals nan."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (_unlike(one[key], other[key], f"{where}.{key}") for key in one)), "")
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
        return next(filter(None, (_unlike(*both, where) for both in zip(one, other, strict=True))), "")
    if isinstance(one, np.ndarray):
        return "" if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc") else where
    return "" if one == other or (one != one and other != other) else f"{where}: {one!r} and {other!r}"


STAGES: dict[str, Callable[[Subject], None]] = {
    "random_state": random_state,
    "simulator": simulator,
    "nothing_lost": nothing_lost,
    "layers": layers,
    "weights": weights,
    "exact": exact,
    "projection": projection,
    "automatic": automatic,
    "budget": budget,
    "bad_cases": bad_cases,
    "profiles": profiles,
    "check": checked,
    "annotations": annotated,
    "two_graphs": two_graphs,
    "as_deployed": as_deployed,
    "diagnosis": diagnosed,
    "reconfigured": reconfigured,
    "repaired": repaired,
    "deployed": deployed,
    "merged": merged,
    "views": views,
}
EVERY = {"diagnosis": 9, "reconfigured": 11, "repaired": 13, "deployed": 17, "merged": 2, "two_graphs": 2, "check": 2}
"""The costly stages, and one in how many models they run on."""
