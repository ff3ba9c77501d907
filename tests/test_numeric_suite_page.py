"""The table of docs/numeric_suite.md names every public function of the tools, and what it names here exists."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest

import pt2qa

TABLE = (Path(__file__).resolve().parents[1] / "docs" / "numeric_suite.md").read_text().partition("## What to call")[2]

TUNING_KIT = (
    *("check_qat_model", "QuantAnalysis", "ModelProfiler", "HbirModelProfiler", "get_info_manager"),
    *(
        f"QuantAnalysis.{method}"
        for method in (
            *("auto_find_bad_case", "set_bad_case", "load_bad_case", "save_bad_case", "set_model_profiler_dir"),
            *("run", "compare_per_layer", "sensitivity", "clean"),
        )
    ),
    *("OpRunningInfoManager.table", "OpRunningInfoManager.tensorboard"),
)
"""Of its manual: it is no package that could be inspected."""


def section(title: str) -> str:
    """The rows between the title of a tool and the next one."""
    return TABLE.partition(f"**{title}**")[2].partition("| **")[0]


def public_names(module: str) -> set[str]:
    """Functions and classes that a module defines, by the file that they are in: torchao renames their modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is old
        loaded = importlib.import_module(module)
    own = [each for each in vars(loaded).items() if inspect.isfunction(each[1]) or inspect.isclass(each[1])]
    return {name for name, value in own if not name.startswith("_") and _file(value) == loaded.__file__}


def _file(value: object) -> str | None:
    try:
        return inspect.getsourcefile(value)  # type: ignore[arg-type]
    except TypeError:  # a class that is written in C
        return None


@pytest.mark.parametrize(
    ("module", "title", "at_least"),
    [
        ("torch.ao.ns._numeric_suite", "`torch.ao.ns._numeric_suite`", 10),
        ("torch.ao.ns._numeric_suite_fx", "`torch.ao.ns._numeric_suite_fx`", 15),
        ("torchao.quantization.pt2e._numeric_debugger", "torchao's numeric debugger", 6),
    ],
)
def test_every_public_function_and_class_is_in_the_table(module: str, title: str, at_least: int) -> None:
    names = public_names(module)
    assert len(names) >= at_least
    assert [name for name in sorted(names) if f"`{name}`" not in section(title)] == []


def test_every_function_of_the_tuning_kit_is_in_the_table() -> None:
    assert [name for name in TUNING_KIT if f"`{name}`" not in section("accuracy-tuning kit")] == []


def test_what_the_table_says_to_call_exists() -> None:
    named = re.findall(r"pt2qa\.(\w+)(?:\.(\w+))?", TABLE)
    assert len(named) > 30
    for name, attribute in named:
        found = getattr(pt2qa, name)
        known = {*dir(found), *getattr(found, "__annotations__", {})}
        assert not attribute or attribute in known, f"pt2qa.{name}.{attribute}"
