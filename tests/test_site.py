"""The reference of the site is complete; ``make docs`` builds the site and checks its links."""

from __future__ import annotations

import importlib.util
import inspect
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pt2qa
from pt2qa._report.storage import kinds
from pt2qa.cli import main
from tests.check.rule_examples import every_rule

SITE = Path(__file__).parents[1] / "docs" / "site"


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_reference", SITE / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def pages() -> dict[str, str]:
    found: dict[str, str] = reference().pages()
    return found


@pytest.mark.parametrize("module", ["", "report", "metrics", "overrides", "plugins", "testing"])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    owner: Any = importlib.import_module(f"pt2qa.{module}" if module else "pt2qa")
    page = pages()[f"reference/{module or 'pt2qa'}.md"]
    shown = {name.rpartition(".")[2] for name in re.findall(r"^(?:::: |- `)([\w.]+)", page, re.MULTILINE)}
    assert shown == {name for name in owner.__all__ if name != "__version__"}


def test_every_command_and_rule_is_in_the_reference() -> None:
    assert re.findall(r"^## pt2qa (\S+)", pages()["reference/commands.md"], re.MULTILINE) == sorted(main.commands)
    assert re.findall(r"^## (\S+)", pages()["reference/rules.md"], re.MULTILINE) == list(every_rule())


def test_every_kind_of_report_has_its_columns_and_its_fields() -> None:
    assert pt2qa.LayerReport.kind == "layers"
    for page in ("columns", "files"):
        found = re.findall(r"^## (\S+)", pages()[f"reference/{page}.md"], re.MULTILINE)
        assert found == sorted(kind.kind for kind in kinds())


def test_every_column_has_a_meaning() -> None:
    rows = [line.split(" | ") for line in pages()["reference/columns.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [cells[0] for cells in rows if not cells[-1].removeprefix("*extended*. ").strip(" |")] == []


def test_every_field_of_a_file_has_a_type() -> None:
    rows = [line.split(" | ") for line in pages()["reference/files.md"].splitlines() if line.startswith("| `")]
    assert [cells[0] for cells in rows if "``" in cells[1] or "Annotated" in cells[1]] == []


CALLABLES = [name for name in pt2qa.__all__ if callable(getattr(pt2qa, name))]
FUNCTIONS = [name for name in CALLABLES if inspect.isfunction(inspect.unwrap(getattr(pt2qa, name)))]
ERRORS = [name for name in CALLABLES if name.endswith("Error")]


def said_of(name: str) -> str:
    return inspect.getdoc(getattr(pt2qa, name)) or ""


def sections_of(function: Any) -> dict[str, str]:
    said = inspect.getdoc(function) or ""
    parts = re.split(r"^(Args|Returns|Yields|Raises|Source):$|^(?=>>> )", said, flags=re.MULTILINE)
    return {head: text for head, text in pairwise(parts) if head}


@pytest.mark.parametrize("module", ["", "report", "metrics", "overrides", "plugins", "testing"])
def test_functions_name_their_parameters(module: str) -> None:
    owner: Any = importlib.import_module(f"pt2qa.{module}" if module else "pt2qa")
    for function in filter(inspect.isfunction, (getattr(owner, name) for name in owner.__all__)):
        args = re.findall(r"^ {4}(\w[\w, ]*):", sections_of(function).get("Args", ""), re.MULTILINE)
        assert set(re.findall(r"\w+", " ".join(args))) == set(inspect.signature(function).parameters), function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_gives_and_raises(name: str) -> None:
    sections, signature = sections_of(getattr(pt2qa, name)), inspect.signature(getattr(pt2qa, name))
    assert ("Returns" in sections or "Yields" in sections) == (signature.return_annotation != "None")
    assert "Raises" in sections


@pytest.mark.parametrize("name", sorted(set(CALLABLES) - set(ERRORS)))
def test_a_name_has_an_example_that_runs_or_says_which_function_gives_it(name: str) -> None:
    said = said_of(name)
    makers = re.findall(r":func:`pt2qa\.(\w+)`(?=[^.]* returns?\.)", said)
    assert ">>> " in said or any(">>> " in said_of(maker) for maker in makers)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_in_what_a_function_raises_or_among_the_common_ones(name: str) -> None:
    common = (SITE.parent / "common_errors.md").read_text()
    raised = any(re.search(rf"^ {{4}}{name}:", said_of(each), re.MULTILINE) for each in CALLABLES)
    assert raised or ">>> " in said_of(name) or f"{name}: " in common
