"""The campaign of ``make fuzz-lowering``: that it finds a kernel that differs, and that its script shows it alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.flows import NARROW
from tests.fuzz import lowering
from tests.fuzz.grammar import Gene, Genome

LINEAR = Genome(((6, 5),), {0: Gene("linear_relu", -1, -1, 4), 1: Gene("linear", 0, 0, 3)}, (1,), ("wide",), "x86", 3)


def test_small_models_are_right_on_the_kernels_and_are_drawn_alike_each_time() -> None:
    healthy = [] if NARROW else [LINEAR]
    for genome in (*healthy, lowering.replace(LINEAR, quantizer="everything")):
        outcome = lowering.analyse(genome)
        assert not outcome.failures
        assert outcome.counts[f"{'x86' if genome is LINEAR else 'xnnpack'}: values"] >= 2
    assert lowering.drawn(5) == lowering.drawn(5)
    assert {lowering.drawn(seed).quantizer for seed in range(100)} == lowering.QUANTIZERS.keys()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="Inductor's int8 kernels are oneDNN's")
def test_a_kernel_that_ignores_limits_is_found_and_its_script_shows_it_without_this_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Known: fused uint8 outputs of x86 are clamped to 0..255, with 7 bits as well.
    monkeypatch.setitem(lowering.OPTIONS, "x86", {"reduce_range": True})
    monkeypatch.setitem(lowering.OWN_OPTIONS, "x86", "reduce_range=True")
    line, trace = lowering.analyse(LINEAR).failures["x86"]
    assert line.startswith("Wrong: relu of uint#, x#: its integers are clamped")
    text = lowering.script(LINEAR, "x86", line, trace)
    assert "pt2qa" not in text.partition("# Traceback")[0]
    path = tmp_path / "found.py"
    path.write_text(text)
    ran = subprocess.run([sys.executable, "-W", "ignore", path], capture_output=True, text=True, check=True)
    apart = float(re.search(r"deployed and converted are ([\d.]+) dB apart", ran.stdout)[1])  # type: ignore[index]
    assert apart < 30
