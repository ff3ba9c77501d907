"""``make bench-repair``: what each repair gives on data that nothing was fitted to, on pretrained models.

For each model and quantizer: as quantized (plain), with the fusions that the backend supports and the quantizer does
not annotate (fused), each repair of each of these and all of them, with a bootstrap interval of what all gain; the time
of all in float forwards of the same data; and beside it the best of NNCF's options, where an environment has NNCF.
NNCF's option is chosen on the held-out data itself, which favours it.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from tabulate import tabulate
from torch import Tensor
from torch.fx import GraphModule

import pt2qa
from pt2qa import OverridePlan
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.methods import METHODS
from pt2qa.overrides import fusions
from tests.benchmarks.repair_models import INSERTED, NAMES, Setting, rounded_weights, setting

QUANTIZERS = ("xnnpack", "x86")
LEAST = -0.2
"""Bar: the change in dB on held-out data that no repair may fall below."""
MOST = 60.0
"""Bar: float forwards of the calibration data that all repairs may take."""
RESAMPLES = 2000
"""Bootstrap samples of the held-out data."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.repairs", description=__doc__)
    parser.add_argument("--model", action="append", choices=NAMES, help="these alone")
    parser.add_argument("--quantizer", action="append", choices=QUANTIZERS, help="these alone")
    parser.add_argument("--nncf", help="the Python of an environment that has NNCF")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Sequence[object]] = []
    missed: list[str] = []
    for model in arguments.model or NAMES:
        for quantizer in arguments.quantizer or QUANTIZERS:
            for row, failed in measure(model, quantizer, arguments.nncf):
                rows.append(row)
                missed += failed
                print(*row, *failed, sep=" | ", file=sys.stderr, flush=True)
    headers = [
        "model",
        "quantizer",
        "plain",
        *METHODS,
        "all",
        "90 % of gain",
        "float forwards",
        "NNCF's best",
        "option",
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", floatfmt=".1f"))
    print("\n".join(["", *missed]))
    return 1 if missed else 0


def measure(model: str, quantizer: str, nncf: str | None) -> list[tuple[Sequence[object], list[str]]]:
    """A row as quantized and, if there is something to fuse, one with that; each with the bars that it misses."""
    given = setting(model)
    capture = pt2qa.capture(given.model, (given.calibration[0],))
    plans = {quantizer: OverridePlan(())}
    if fused := fusions(capture, quantizer):
        plans[f"{quantizer}, fused"] = OverridePlan(fused)
    rows: list[tuple[Sequence[object], list[str]]] = []
    for name, plan in plans.items():
        pair = pt2qa.quantize(capture, quantizer, given.calibration, overrides=plan, progress=False)
        with torch.no_grad():
            reference = torch.cat([given.model(batch) for batch in given.held_out])
        plain = _errors(pair.quantized, given, reference)
        found: list[Tensor] = []
        cost = 0.0
        for methods in [*([each] for each in METHODS), None]:
            forward = _seconds_of_forward(pair, given.calibration)
            begun = time.process_time()
            report = pt2qa.repair(pair, given.held_out, methods=methods, verify_code=False, progress=False)
            cost = (time.process_time() - begun) / forward
            assert report.pair is not None
            assert _ops(report.pair.quantized) == _ops(pair.quantized), f"{model}, {name}: other ops"
            found.append(_errors(report.pair.quantized, given, reference))
        low, high = _interval(plain, found[-1], reference)
        option, theirs = _nncf(nncf, model, quantizer, plan, reference, rounded_weights(pair.quantized))
        before, *after = (_decibels(each, reference) for each in (plain, *found))
        gain = f"{low:+.1f} to {high:+.1f}"
        row = (model, name, before, *after, gain, round(cost), theirs, option)
        rows.append((row, _missed(f"{model}, {name}", before, after, cost, theirs)))
    return rows


def _missed(row: str, before: float, after: Sequence[float], cost: float, theirs: float) -> list[str]:
    """The bars that a row misses, in words."""
    lost = [f"{row}: {each:.1f} dB, {before:.1f} plain" for each in after if each < before + LEAST]
    slow = [f"{row}: {cost:.0f} float forwards, the bar is {MOST:g}"] if cost > MOST else []
    return [*lost, *slow, *([f"{row}: {after[-1]:.1f} dB, NNCF's best {theirs:.1f}"] if theirs > after[-1] else [])]


def _nncf(
    python: str | None, model: str, quantizer: str, plan: OverridePlan, reference: Tensor, rounded: int
) -> tuple[str, float]:
    """The best of NNCF's options on the held-out data, of those with as many integer weights, and its SQNR in dB."""
    if python is None:
        return "not run", math.nan
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outputs.safetensors"
        command = [python, "-W", "ignore", "-m", "tests.benchmarks.nncf_options", model, quantizer]
        subprocess.run([*command, plan.to_json(), str(out)], check=True, stdout=subprocess.DEVNULL)
        with safe_open(out, "pt") as file:
            counts = {option: int(count) for option, count in file.metadata().items()}
            outputs = {option: file.get_tensor(option) for option in file.keys()}  # noqa: SIM118  it is no mapping
    for option in outputs:
        if counts[option] != rounded:
            print(f"NNCF, {option}: {counts[option]} integer weights, not {rounded}: left out", file=sys.stderr)
    found = {
        option: _decibels(_squares(own, reference), reference)
        for option, own in outputs.items()
        if counts[option] == rounded
    }
    best = max(found, key=found.__getitem__, default="none")
    inserted = counts.get(f"{best}{INSERTED}", 0)
    return f"{best}, {inserted} more ops" if inserted else best, found.get(best, math.nan)


def _errors(graph: GraphModule, given: Setting, reference: Tensor) -> Tensor:
    """The squared error of each held-out sample: float64 of shape (samples,)."""
    with torch.no_grad():
        return _squares(torch.cat([graph(batch) for batch in given.held_out]), reference)


def _squares(quantized: Tensor, reference: Tensor) -> Tensor:
    return (quantized.double() - reference.double()).square().flatten(1).sum(1)


def _decibels(errors: Tensor, reference: Tensor) -> float:
    return float(10 * (reference.double().square().sum() / errors.sum()).log10())


def _interval(before: Tensor, after: Tensor, reference: Tensor) -> tuple[float, float]:
    """5th and 95th percentile of the gain in dB, by drawing the held-out samples again."""
    drawn = torch.randint(len(reference), (RESAMPLES, len(reference)), generator=torch.Generator().manual_seed(0))
    gains = 10 * (before[drawn].sum(1) / after[drawn].sum(1)).log10()
    low, high = gains.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    return low, high


def _ops(graph: GraphModule) -> Counter[str]:
    """How often a converted graph calls each op."""
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def _seconds_of_forward(pair: QuantizedPair, batches: list[Tensor]) -> float:
    """Processor time of the float graph on all batches, the best of three."""
    graph, best = pair.float_graph, float("inf")
    assert graph is not None
    with torch.no_grad():
        for _ in range(4):
            begun = time.process_time()
            for batch in batches:
                graph(batch)
            best = min(best, time.process_time() - begun)
    return best


if __name__ == "__main__":
    sys.exit(main())
