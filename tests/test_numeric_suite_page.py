"""The table of docs/numeric_suite.md names every public function of the tools, and what it names here exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest

import pt2qa
from pt2qa.compat import numeric_suite, tuning_kit

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "numeric_suite.md").read_text().partition("## What to call")[2]

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

EAGER_AND_FX = (
    *("quantize_dynamic", "prepare", "convert", "prepare_qat", "prepare_fx", "convert_fx", "QuantStub", "DeQuantStub"),
    *("FloatFunctional", "fuse_modules", "QConfig", "QConfigMapping", "get_default_qconfig", "Observer", "from_float"),
    *("prepare_pt2e", "prepare_qat_pt2e", "convert_pt2e", "capture_pre_autograd_graph", "from_observed"),
)
PARAMETERS = (
    *("baseline_model", "analysis_model", "analysis_model_type", "device_ids", "post_process", "out_dir"),
    *("data_generator", "num_steps", "metric", "device", "custom_metric_func", "custom_metric_order_seq"),
    *("cached_attrs", "dump_in_run", "baseline_model_cached_attr", "analysis_model_cached_attr", "filename", "index"),
    *("prefixes", "types", "reserve", "with_stack", "force_per_channel", "save_results"),
)
COLUMNS = (
    *("Index", "mod_name", "base_op_type", "analy_op_type", "shape", "quant_dtype", "qscale", "Cosine", "L1", "Atol"),
    *("max_qscale_diff", "base_model_min", "analy_model_min", "base_model_max", "analy_model_max", "base_model_mean"),
    *("analy_model_mean", "op_name", "sensitive_type", "op_type", "flops", "Op Name", "Mod Name", "Attr", "Dtype"),
    *("Scale", "Min", "Max", "Mean", "Var", "Shape", "Module Name", "Input dtype", "out dtype", "weight dtype"),
    *("ch_axis", "observer"),
)
FILES = (
    *("model_check_result.txt", "badcase.txt", "badcase.pt", "compare_per_layer_out.txt", "compare_per_layer_out.csv"),
    *("abnormal_layer_advisor.txt", "statistic.txt", "tensorboard/"),
)


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


def test_every_name_of_numeric_suite_is_in_the_layer_for_old_scripts() -> None:
    names = public_names("torch.ao.ns._numeric_suite")
    assert names - set(dir(numeric_suite)) == {"Shadow"}  # which is put into a model
    assert [name for name in TUNING_KIT if not _has(tuning_kit, name)] == ["get_info_manager"]  # of ModelProfiler


def _has(module: object, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return hasattr(getattr(module, owner) if owner else module, attribute)


def test_every_name_of_the_manuals_is_in_the_table() -> None:
    assert [name for name in TUNING_KIT if f"`{name}`" not in section("accuracy-tuning kit")] == []
    assert [name for name in EAGER_AND_FX if f"`{name}`" not in section("eager and FX mode, and PT2E by hand")] == []
    assert [name for name in PARAMETERS if f"`{name}=`" not in section("its parameters")] == []
    assert [name for name in COLUMNS if f"`{name}`" not in section("its columns")] == []
    assert [name for name in FILES if f"`{name}`" not in section("its files")] == []


ROWS = re.findall(r"^\| (?!---|in the other)([^|]+) \| ([^|]+) \| `?([^|`]*)`? \|$", TABLE, re.MULTILINE)


def functions_of(file: Path) -> set[str]:
    """The names of a file's test functions."""
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_each_row_of_the_table_names_a_test_that_exists() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.endswith(("| | |", "- |"))]
    assert len(ROWS) == len(lines) - 1, "a row that is not: other tool, pt2qa, test"
    assert len(ROWS) > 80
    known = {file: functions_of(ROOT / file) for file in {test.partition("::")[0] for _, _, test in ROWS}}
    assert [test for _, _, test in ROWS if test.partition("::")[2] not in known[test.partition("::")[0]]] == []


def test_what_the_table_says_to_call_exists() -> None:
    named = re.findall(r"pt2qa\.(\w+)(?:\.(\w+))?", TABLE)
    assert len(named) > 30
    for name, attribute in named:
        found = getattr(pt2qa, name)
        known = {*dir(found), *getattr(found, "__annotations__", {})}
        assert not attribute or attribute in known, f"pt2qa.{name}.{attribute}"
