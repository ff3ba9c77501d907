"""Which tests answer for which modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DEFAULTS = "tests/report/test_row_defaults.py"

ROOMS: dict[str, tuple[str, ...]] = {
    "pt2qa/_metrics.py": ("tests/test_metrics.py", "tests/simulator/test_fused.py", "tests/layers/test_layers.py"),
    "pt2qa/_graph": (
        "tests/graph",
        "tests/test_handles.py",
        "tests/test_agreement.py",
        "tests/test_pairing.py",
        "tests/test_pairing_without_handles.py",
        "tests/capture/normalise/test_attention.py",
        "tests/capture/normalise/test_sources.py",
        "tests/overrides/test_code.py",
        "tests/test_plain_flow.py",
    ),
    "pt2qa/_simulator": (
        "tests/simulator",
        "tests/layers",
        "tests/test_pairing.py",
        "tests/test_quantization.py",
        "tests/test_live_graphs.py",
        "tests/graph/test_internals.py",
        "tests/test_masked_bad_cases.py",
        "tests/profile/test_mask.py",
    ),
    "pt2qa/_layers": ("tests/layers", "tests/report/test_report_text.py", "tests/merge/test_merge_layers.py", DEFAULTS),
    "pt2qa/_weights": (
        "tests/layers/test_weights.py",
        "tests/layers/test_weight_sums.py",
        "tests/layers/test_weight_rows.py",
        DEFAULTS,
    ),
    "pt2qa/_sensitivity": (
        "tests/sensitivity",
        "tests/report/test_sensitivity_report.py",
        "tests/merge/test_merge_sensitivity.py",
        "tests/repair/test_ranges.py",
        "tests/diagnosis/test_projected.py",
    ),
    "pt2qa/_bad_cases": (
        "tests/bad_cases",
        "tests/test_bad_cases.py",
        "tests/test_masked_bad_cases.py",
        "tests/report/test_bad_cases_report.py",
        DEFAULTS,
        "tests/merge/test_merge_bad_cases.py",
    ),
    "pt2qa/_diagnosis": (
        "tests/diagnosis",
        "tests/merge/test_merge_budgets.py",
        DEFAULTS,
        "tests/simulator/test_nested_graphs.py",
    ),
    "pt2qa/_check": ("tests/check",),
}
"""Tests by the folder or file that they are for."""

APART = ("mutants", "soak", "strangers", "sweep", "zoo", "benchmarks", "test_wording.py", "test_packaging.py")
"""What runs the library in other processes, or not at all, or needs other packages."""

BESIDE = ("blocks.py", "charts.py", "steps.py")
"""Files of what pages draw, which other tests look at."""


def tests_of(path: str) -> tuple[str, ...]:
    """The tests that answer for a module."""
    return next(tests for room, tests in ROOMS.items() if path.startswith(room))


def every_test(root: Path) -> list[str]:
    """The folders and files of all tests, to be run one by one."""
    found = (path for path in (root / "tests").iterdir() if path.is_dir() or path.name.startswith("test_"))
    return sorted(str(path.relative_to(root)) for path in found if path.name not in APART and any(_modules(path)))


def _modules(path: Path) -> Iterable[Path]:
    return path.rglob("test_*.py") if path.is_dir() else [path]
