"""The table of ``docs/deployed.md``: one graph on several runtimes, ``python -m tests.runtimes.table``."""

from __future__ import annotations

import math

import pt2qa
from tests.runtimes.nets import NETS, quantized

ENGINES = {
    "XNNPACK": "xnnpack",
    "ONNX Runtime": "onnxruntime:int8_activations=true",
    "OpenVINO": "openvino",
}


def main() -> None:
    """Prints a row for each net, quantizer and engine."""
    print("| net, quantizer | engine | on integers | observed | largest LSB | deployed and converted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for net in NETS:
        for quantizer in ("xnnpack", "x86"):
            pair, batches = quantized(net, quantizer)
            for name, backend in ENGINES.items():
                try:
                    found = pt2qa.compare_deployed(pair, batches, backend=backend, progress=False)
                except pt2qa.DeploymentError as error:
                    print(f"| {net}, {quantizer} | {name} | does not run: {str(error)[:150]!r} | | | |")
                    continue
                seen = [row for row in found.rows if not row.note]
                steps = [row.isolated_max_lsb for row in seen if not math.isnan(row.isolated_max_lsb)]
                print(
                    f"| {net}, {quantizer} | {name} | {sum(row.delegated for row in found.rows)} of {len(found.rows)} | "
                    f"{len(seen)} | {max(steps, default=0):.0f} | {found.stages[-1].step_sqnr:.1f} dB |"
                    f" {[(row.name, row.isolated_max_lsb, row.isolated_differing) for row in seen if row.isolated_max_lsb >= 1]}"
                    f" {[(row.name, row.isolated_sqnr) for row in found.suspects]}"
                )


if __name__ == "__main__":
    main()
