"""What NNCF makes of a model, with each of its options; run by the Python of an environment that has it.

``python -m tests.benchmarks.nncf_options MODEL QUANTIZER FUSIONS OUT`` quantizes with ``quantize_pt2e`` and the
quantizer X
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import pt2qa
from pt2qa import OverridePlan
from tests.benchmarks.repair_models import INSERTED, rounded_weights, setting


def options() -> dict[str, dict[str, Any]]:
    """Arguments of ``quantize_pt2e``: its bias corrections, its smoothing, and its range estimators."""
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet  # type: ignore[import-not-found]

    estimators = {
        "mean min/max": RangeEstimatorParametersSet.MEAN_MINMAX,
        "median min/max": RangeEstimatorParametersSet.MEDIAN_MINMAX,
        "mean quantiles": RangeEstimatorParametersSet.MEAN_QUANTILE,
        "histogram": RangeEstimatorParametersSet.HISTOGRAM,
    }
    return {
        "fast bias correction": {},
        "bias correction": {"fast_bias_correction": False},
        "no bias correction": {"fast_bias_correction": None},
        "SmoothQuant": {"smooth_quant": True},
        **{name: {"activations_range_estimator_params": each} for name, each in estimators.items()},
    }


def main() -> None:
    import nncf  # type: ignore[import-not-found]
    from nncf.experimental.torch.fx import quantize_pt2e  # type: ignore[import-not-found]

    name, quantizer, fusions, out = sys.argv[1:]
    nncf.set_log_level(logging.ERROR)
    given = setting(name)
    plan = OverridePlan.from_json(fusions)
    capture = pt2qa.capture(given.model, (given.calibration[0],))
    outputs: dict[str, torch.Tensor] = {}
    counts: dict[str, str] = {}
    for option, arguments in options().items():
        exported = capture.module()
        data = nncf.Dataset(given.calibration)
        try:
            made = quantize_pt2e(
                exported, plan.apply_to(quantizer), data, subset_size=len(given.calibration), **arguments
            )
        except Exception as error:  # an option of theirs that fails on a model is a row without it, and is said
            print(f"NNCF, {option}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        with torch.no_grad():
            outputs[option] = torch.cat([made(batch) for batch in given.held_out])
        counts[option] = str(rounded_weights(made))
        counts[f"{option}{INSERTED}"] = str(sum(node.op == "call_module" for node in made.graph.nodes))
    if not outputs:
        sys.exit("NNCF: none of its options quantized the model")
    save_file(outputs, Path(out), counts)


if __name__ == "__main__":
    main()
