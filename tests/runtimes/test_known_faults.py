"""A known fault of one engine's kernels, found as the others compute the same graph right."""

from __future__ import annotations

import pytest
import torch

import pt2qa
from tests.quantizers.test_separation import CAUSES, Twice, X, converted, seeded
from tests.runtimes.nets import EXACT

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")


def test_the_bias_that_xnnpack_scales_wrong_is_a_fault_of_its_kernel_and_not_of_the_quantization() -> None:
    """ExecuTorch's delegate holds the bias of a linear that is called twice with the first call's scale."""
    pair = pt2qa.pair(torch.export.export(seeded(Twice), (X,)), converted(shared=True), quantizer="xnnpack")
    names = ["xnnpack", "onnxruntime:int8_activations=true", EXACT]
    report = pt2qa.compare_runtimes(pair, [X], names)
    wrong = [(row.op, row.differ, row.right) for row in report.rows if row.differ]
    assert wrong == [("linear", ("xnnpack",), 2)]
    (row,) = [row for row in report.rows if row.differ]
    said = " ".join(report.summary().split())
    assert f"{row.name}: 2 of 3 compute what the converted graph says, and xnnpack (" in said
    assert f"its kernel is at fault. Cause: {CAUSES['xnnpack-shared-bias']} (xnnpack)." in said
    apart = {runtime.name: runtime.apart for runtime in report.runtimes}
    assert apart["xnnpack"] < 10
    assert min(apart[name] for name in names[1:]) > 100
