"""The features of a CPU: those that are asked for, or what the machine says."""

from __future__ import annotations

from pathlib import Path

import pytest

import pt2qa
from pt2qa._check import analysis
from pt2qa._check.analysis import cpu_features

INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 avx2 avx512_vnni\nvmx flags\t: vnmi\n\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp ASIMD asimddp i8mm\nCPU part\t: 0xd40\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which Linux says what the CPU can do."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(analysis, "_CPUINFO", path)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [(INTEL, {"fpu", "sse2", "avx2", "avx512_vnni"}), (ARM, {"fp", "asimd", "asimddp", "i8mm"})],
    ids=["x86", "arm"],
)
def test_linux_lists_what_the_cpu_can_do(machine: Path, text: str, expected: set[str]) -> None:
    machine.write_text(text * 2)
    assert cpu_features(None) == expected


@pytest.mark.parametrize("text", [None, "processor\t: 0\nisa\t: rv64imafdc\n"], ids=["no file", "no such line"])
def test_where_linux_says_nothing_torch_is_asked(
    machine: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        machine.write_text(text)
    monkeypatch.setattr(analysis.platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(analysis, "instructions_found", lambda: {"avx512_vnni": True, "amx_int8": False})
    assert cpu_features(None) == {"amd64", "avx512_vnni"}


def test_a_cpu_may_be_named() -> None:
    assert cpu_features("vnni") == {"avx512_vnni"}
    assert cpu_features("no-vnni") == {"avx2"}
    assert cpu_features(["AVX2", "avx_vnni"]) == {"avx2", "avx_vnni"}
    with pytest.raises(pt2qa.SelectionError, match=r"cpu: 'avx 2' is not the name of a CPU feature"):
        cpu_features(["avx 2"])
