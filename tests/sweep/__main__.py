"""``make sweep``: each kind of op on the kernels of XNNPACK against the converted graph, int8 in and int8 out.

Each op is a branch of its own, at several scales and offsets of its data, and with weights per channel and per tensor.
All branches that lower together are one program; an op that breaks it is run by itself.  Prints a table, which
``build/sweep.md`` keeps, and fails if an op is more than one step off that is not in ``KNOWN``.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tabulate import tabulate

import pt2qa
from pt2qa._deployed.report import DeployedRow
from tests.sweep.ops import OPS, Branches
from tests.sweep.quantizer import Everything

ROOT = Path(__file__).parents[2]

DATA: Final = ((1.0, 0.0), (0.01, 0.0), (100.0, 0.0), (1.0, 3.0))
"""Standard deviation of the inputs, and their mean in standard deviations."""

KNOWN: Final[dict[str, str]] = {}
"""Ops that are more than one step off, and why."""


def main() -> int:
    warnings.simplefilter("ignore")
    found: dict[str, list[DeployedRow]] = defaultdict(list)
    failed: dict[str, str] = {}
    for per_channel in (True, False):
        for scale, offset in DATA:
            for name, row in _rows(tuple(OPS), scale, offset, per_channel, failed):
                found[name].append(row)
    lines = [_line(name, found[name], failed.get(name, "")) for name in OPS]
    headers = ["op", "cases", "largest LSB", "differ %", "smallest isolated dB", "kernel", "remark"]
    table = tabulate(lines, headers=headers, tablefmt="github")
    print(table)
    path = ROOT / "build" / "sweep.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(table + "\n")
    off = [name for name in OPS if name not in KNOWN and any(row.is_suspect for row in found[name])]
    if off:
        print(f"\nmore than one step off, unexplained: {', '.join(off)}", file=sys.stderr)
    return 1 if off else 0


def _rows(
    names: Sequence[str], scale: float, offset: float, per_channel: bool, failed: dict[str, str]
) -> Iterator[tuple[str, DeployedRow]]:
    """The last value of each branch; halves that cannot be lowered or run are tried apart."""
    model = Branches(tuple(names)).eval()
    data = model.inputs(scale, offset, seed=0)
    # Other data than was calibrated on, of which some is clamped.
    other = model.inputs(1.3 * scale, offset, seed=1)
    try:
        capture = pt2qa.capture(model, data)
        pair = pt2qa.quantize(capture, Everything(per_channel), [data], progress=False)
        report = pt2qa.compare_deployed(pair, [other], backend="xnnpack", progress=False)
    except pt2qa.Pt2qaError as error:
        if len(names) == 1:
            failed[names[0]] = str(error).splitlines()[0][:100]
            return
        half = len(names) // 2
        yield from _rows(names[:half], scale, offset, per_channel, failed)
        yield from _rows(names[half:], scale, offset, per_channel, failed)
        return
    by_handle = {row.handle: row for row in report.rows}
    for name, handle in zip(names, _last_handles(pair), strict=True):
        yield name, by_handle[handle]


def _last_handles(pair: pt2qa.QuantizedPair) -> list[int]:
    """The handle of the op that makes each output."""
    assert pair.float_graph is not None
    outputs = pair.float_graph.graph.output_node().args[0]
    return [node.meta["custom"]["numeric_debug_handle"] for node in outputs]  # type: ignore[union-attr]


def _line(name: str, rows: Sequence[DeployedRow], failure: str) -> tuple[str, ...]:
    remark = "; ".join(filter(None, (KNOWN.get(name, ""), failure, *{row.note for row in rows})))
    measured = [row for row in rows if not math.isnan(row.isolated_max_lsb)]
    kernels = {"XNNPACK" if row.delegated else "portable" for row in rows}
    if not measured:
        return name, "0", "", "", "", ", ".join(sorted(kernels)), remark
    return (
        name,
        str(len(measured)),
        f"{max(row.isolated_max_lsb for row in measured):g}",
        f"{100 * max(row.isolated_differing for row in measured):.2g}",
        f"{min(row.isolated_sqnr for row in measured):.1f}",
        ", ".join(sorted(kernels)),
        remark,
    )


if __name__ == "__main__":
    sys.exit(main())
