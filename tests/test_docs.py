"""The pages tell the truth: their code runs, what they print is printed, their commands and links exist."""

from __future__ import annotations

import copy
import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import pt2qa
from pt2qa.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def site_module(name: str) -> ModuleType:
    """A module of the folder that builds the site, which is no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks = site_module("notebooks")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
_PART = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?|[^\s\d]+")
_RULE = re.compile(r"-+( +-+)+")

SPREAD = 0.03
"""By what share a number on a page may differ from what this machine prints."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that it starts on."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2))) for found in _FENCE.finditer(text)]


def parts_of(text: str) -> list[str]:
    """Words and numbers in their order, however the lines are broken; rules of tables are left out."""
    return [part for part in _PART.findall(text) if part.strip("-")]


def alike(shown: str, printed: str) -> bool:
    """Whether two parts are equal; numbers with a point may differ as kernels of two machines do, integers may not."""
    if shown == printed or not (_NUMBER.fullmatch(shown) and _NUMBER.fullmatch(printed)) or shown.isdigit():
        return shown == printed
    last_digit = 10.0 ** -len(shown.partition("e")[0].partition(".")[2]) if "e" not in shown else 0.0
    return abs(float(shown) - float(printed)) <= 1.5 * last_digit + SPREAD * abs(float(printed))


def stands_in(shown: list[str], printed: list[str]) -> bool:
    """Whether parts stand in others, one after the other."""
    starts = range(len(printed) - len(shown) + 1)
    return any(all(alike(*pair) for pair in zip(shown, printed[start:], strict=False)) for start in starts)


def not_printed(shown: str, printed: str) -> list[str]:
    """The lines of a text that are not printed; "..." and "…" stand for anything.

    A row of a table must be a printed line from its beginning to its end, so that an empty cell is missed.
    """
    everything = parts_of(printed)
    lines = [parts_of(line) for line in printed.splitlines()]
    missing, in_table = [], False
    for line in shown.splitlines():
        if _RULE.fullmatch(line.strip()):
            in_table = True
            continue
        in_table = in_table and bool(line.strip())
        pieces = [parts_of(piece) for piece in re.split(r"\.\.\.|…", line)]
        if in_table and len(pieces) == 1:
            found = any(len(pieces[0]) == len(row) and stands_in(pieces[0], row) for row in lines)
        else:
            found = stands_in(parts_of(line), everything) or all(stands_in(piece, everything) for piece in pieces)
        if not found:
            missing.append(line)
    return missing


def commands_of(page: Path, program: str) -> list[list[str]]:
    lines = [line for block in blocks_of(page) if block.language == "console" for line in block.text.splitlines()]
    commands = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]
    return [command[1:] for command in commands if command and command[0] == program]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in notebooks.TUTORIALS], ids=lambda page: page.name
)
def test_code_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of one page share their names; a text block shows what the Python block before it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            # The empty lines make a traceback point to the line of the page.
            exec(compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True), module.__dict__)
            printed = capsys.readouterr().out
        elif block.language == "text" and printed:
            missing = not_printed(block.text, printed)
            assert not missing, f"{page.name}, line {block.line}: shows {missing}; printed is\n{printed}"


def printed_by(cell: Any) -> str:
    return "".join(output.text for output in cell.get("outputs", ()) if output.get("name") == "stdout")


@pytest.mark.parametrize("name", notebooks.TUTORIALS)
def test_a_notebook_runs_and_prints_what_it_stores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tutorials that are notebooks, too, run as such, in a process of their own."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    page = ROOT / "docs" / name
    stored = nbformat.from_dict(notebooks.notebook_of(page.read_text()))
    nbformat.validate(stored)
    languages = [block.language for block in blocks_of(page)]
    assert languages.count("python") == sum(cell.cell_type == "code" for cell in stored.cells)
    assert languages.count("text") == sum(bool(printed_by(cell)) for cell in stored.cells)
    where = {"metadata": {"path": str(tmp_path)}}
    run = NotebookClient(copy.deepcopy(stored), kernel_name="python3", resources=where).execute()
    for shown, executed in zip(stored.cells, run.cells, strict=True):
        assert not_printed(printed_by(shown), printed_by(executed)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for arguments in commands_of(page, "pt2qa"):
        subcommand, *rest = arguments
        assert subcommand in main.commands, f"{page.name}: pt2qa has no command {subcommand!r}"
        asked = {rest[at + 1].partition(":")[0] for at, given in enumerate(rest) if given == "-q"}
        if asked != {"mynpu"}:  # the plug-in that a reader writes
            main.commands[subcommand].make_context(subcommand, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for arguments in commands_of(page, "make"):
        goals = {each for each in arguments if "=" not in each}  # the others are variables
        assert goals <= set(targets), f"{page.name}: make has no target {' '.join(arguments)!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text())
    targets = [link.partition("#")[0] for link in _LINK.findall(prose) if not link.startswith(("http", "#"))]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}, which are not there"


def test_every_block_says_what_it_is() -> None:
    known = {"python", "console", "text", "toml"}
    unknown = [f"{page.name}, line {block.line}" for page in PAGES for block in blocks_of(page)]
    allowed = [
        f"{page.name}, line {block.line}" for page in PAGES for block in blocks_of(page) if block.language in known
    ]
    assert unknown == allowed


def test_the_design_names_the_whole_public_interface() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    assert [name for name in pt2qa.__all__ if name not in design] == []


PRINTED = """\
name        SQNR  max err
              dB      LSB
--------  ------  -------
1/linear   38.42    0.512
0/conv2d    41.5      inf

A sentence that is long has 3 counts and goes on.
"""


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (PRINTED, []),
        ("A sentence that is\nlong has 3 counts", []),
        ("A sentence ... goes on.", []),
        ("A sentence that is long has 4 counts", ["A sentence that is long has 4 counts"]),
        ("---- ----\n1/linear 38.43 0.512", []),
        ("---- ----\n1/linear 24.4 0.512", ["1/linear 24.4 0.512"]),
        ("---- ----\n1/linear", ["1/linear"]),
        ("---- ----\n0/conv2d 41.5", ["0/conv2d 41.5"]),
    ],
)
def test_what_a_page_shows_is_compared_with_its_numbers(shown: str, missing: list[str]) -> None:
    """An empty row, an empty cell and another number once passed: words alone were compared."""
    assert not_printed(shown, PRINTED) == missing
