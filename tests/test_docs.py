"""The pages tell the truth: their code runs, what they print is printed, their commands and links exist."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import pt2qa
from pt2qa.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that it starts on."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2))) for found in _FENCE.finditer(text)]


def words_of(text: str) -> set[str]:
    """What is printed alike on every machine: everything but numbers and rules."""
    return {word for word in re.split(r"[\s,;:()%]+", text) if word.strip("-.…") and not _NUMBER.fullmatch(word)}


def commands_of(page: Path, program: str) -> list[list[str]]:
    lines = [line for block in blocks_of(page) if block.language == "console" for line in block.text.splitlines()]
    commands = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]
    return [command[1:] for command in commands if command and command[0] == program]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "rules.md"], ids=lambda page: page.name)
def test_code_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of one page share their names; a text block shows what the Python block before it prints.

    The page of the rules is generated, and tested rule by rule in ``tests/checks``.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            # The empty lines make a traceback point to the line of the page.
            exec(compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True), module.__dict__)
            printed = capsys.readouterr().out
        elif block.language == "text" and printed:
            missing = words_of(block.text) - words_of(printed)
            assert not missing, f"{page.name}, line {block.line}: shows {sorted(missing)}, which is not printed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for arguments in commands_of(page, "pt2qa"):
        subcommand, *rest = arguments
        assert subcommand in main.commands, f"{page.name}: pt2qa has no command {subcommand!r}"
        main.commands[subcommand].make_context(subcommand, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for arguments in commands_of(page, "make"):
        assert set(arguments) <= set(targets), f"{page.name}: make has no target {' '.join(arguments)!r}"


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
