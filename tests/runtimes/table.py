"""The table of ``docs/deployed.md``: one graph on several runtimes. ``python -m tests.runtimes.table`` prints it.

``python -m tests.runtimes.table tosa`` prints the rows of one quantizer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import pt2qa
from pt2qa.report import DeployedReport
from tests.runtimes.nets import NETS, quantized

ENGINES = {
    "xnnpack": {
        "XNNPACK": "xnnpack",
        "ONNX Runtime, `int8_activations=true`": "onnxruntime:int8_activations=true",
    },
    "x86": {"oneDNN": "x86", "ONNX Runtime": "onnxruntime"},
    "tosa": {
        "TOSA reference model": "tosa",
        "ONNX Runtime, `int8_activations=true`": "onnxruntime:int8_activations=true",
    },
}
OPENVINO = {
    "OpenVINO": "openvino",
    "OpenVINO as it ships": "openvino:precision=auto,dynamic_quantization=true",
}


def columns(report: DeployedReport) -> list[str]:
    """What the table says of a report."""
    seen = [row for row in report.rows if row.is_measured]
    steps = [row.isolated_max_lsb for row in seen if not math.isnan(row.isolated_max_lsb)]
    apart = min(row.cumulative_sqnr for row in report.outputs)
    return [
        f"{sum(row.delegated for row in report.rows)} of {len(report.rows)}",
        str(len(seen)),
        f"{max(steps):.0f}" if steps else "",
        "equal" if math.isinf(apart) else f"{apart:.0f} dB",
    ]


def rows(quantizers: Sequence[str]) -> Iterator[list[str]]:
    """A row for each net, quantizer and engine."""
    yield ["net, quantizer", "engine", "computed on integers", "observed", "largest LSB", "deployed and converted"]
    yield ["---"] * 6
    for net in NETS:
        for quantizer in quantizers:
            pair, batches = quantized(net, quantizer)
            for engine, backend in {**ENGINES[quantizer], **OPENVINO}.items():
                report = pt2qa.compare_deployed(pair, batches, backend=backend, progress=False)
                yield [f"{net}, {quantizer}", engine, *columns(report)]


if __name__ == "__main__":
    for row in rows(sys.argv[1:] or list(ENGINES)):
        print(f"| {' | '.join(row)} |", flush=True)
