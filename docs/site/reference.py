"""The pages made from the code: names, commands, rules, columns, files, and the example on a real model."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # mkdocs does not have it, and the examples of the rules are among the tests
    sys.path.insert(0, str(ROOT))

from pt2qa._report.rows import columns_of, derived_of, descriptions, tables_of  # noqa: E402
from pt2qa._report.storage import (  # noqa: E402
    CHECKSUM,
    KIND,
    SCHEMA,
    VERSION,
    codecs_of,
    kinds,
)
from pt2qa.cli import main  # noqa: E402
from tests.check.rules_page import page as rules_page  # noqa: E402

MODULES: Final = ("report", "metrics", "overrides", "plugins", "testing")


def pages() -> dict[str, str]:
    """The Markdown of each page, by its path below ``docs``."""
    return {
        "real_model.md": example_page("A real model repaired", "repair", ROOT / "examples" / "efficientnet_lite.py"),
        "reference/pt2qa.md": names_page("pt2qa", ROOT / "pt2qa" / "__init__.pyi"),
        **{f"reference/{module}.md": names_page(f"pt2qa.{module}", _source(module)) for module in MODULES},
        "reference/commands.md": commands_page(),
        "reference/rules.md": rules_page().replace("../docs/check.md", "../check.md"),
        "reference/columns.md": columns_page(),
        "reference/files.md": files_page(),
    }


def example_page(title: str, goal: str, path: Path) -> str:
    """A program that ``make`` runs: what its docstring says, and its code."""
    text = path.read_text(encoding="utf-8")
    said, code = re.fullmatch(r'"""(.*?)"""\n+(.*)', text, re.DOTALL).groups()
    return f"# {title}\n\n{said.strip()}\n\n```console\n$ make {goal}\n```\n\n```python\n{code}```\n"


def _source(module: str) -> Path:
    """The file that lists the public names of a module of pt2qa."""
    base = ROOT / "pt2qa" / module
    files = (base / "__init__.pyi", base.with_suffix(".pyi"), base.with_suffix(".py"))
    return next(path for path in files if path.exists())


def groups_of(path: Path) -> dict[str, list[str]]:
    """The public names in a stub or in ``__all__``, under the comments that stand above them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = text.partition("__all__ = [\n")[2].partition("]")[0]
    found: dict[str, list[str]] = {}
    group = ""
    for line in text.splitlines():
        if line.strip().startswith("# "):
            group = line.strip(" #")
            continue
        names = re.findall(r"(?:\bas|^def) (\w+)" if path.suffix == ".pyi" else r'"(\w+)"', line)
        if names:
            found.setdefault(group, []).extend(names)
    return found


TOP: Final = {name for names in groups_of(ROOT / "pt2qa" / "__init__.pyi").values() for name in names} - {"metrics"}
"""The names at the top level, each with an entry on the first page of the reference."""


def names_page(module: str, path: Path) -> str:
    """What a module offers, for mkdocstrings to fill in; what the top level has as well is a link to there."""
    top = set() if module == "pt2qa" else TOP
    code = (ROOT / "docs" / "site" / "example.py").read_text(encoding="utf-8").partition("\n\n")[2]
    start = f"# {module}\n\nExamples need these lines before them:\n\n```python\n{code}```\n"
    return "\n".join([start, *_names(module, groups_of(path), top)])


def _names(module: str, groups: Mapping[str, list[str]], elsewhere: set[str]) -> Iterator[str]:
    for group, names in groups.items():
        if group:
            yield f"## {group[0].upper()}{group[1:]}\n"
        for name in names:
            if name in elsewhere:
                yield f"- `{name}`: see [pt2qa.{name}][pt2qa.{name}]\n"
            elif f"{module}.{name}" == "pt2qa.metrics":
                yield "- `metrics`: see [pt2qa.metrics](metrics.md)\n"
            else:
                yield f"::: {module}.{name}\n"


def commands_page() -> str:
    """The help of every command, as the program prints it."""
    parts = ["# Commands", "What `pt2qa COMMAND --help` prints."]
    for name in sorted(main.commands):
        command = main.commands[name]
        context = click.Context(command, info_name=f"pt2qa {name}", terminal_width=100, max_content_width=100)
        parts.append(f"## pt2qa {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


def columns_page() -> str:
    """Every column of every table of every kind of report."""
    parts = [
        "# Columns of the reports",
        "A report is a set of tables; `report.rows` is the main one, and `report.to_pandas(part=...)` gives each as a "
        "data frame. *Header* is what tables show above the column, *extended* means that data frames and CSV have it "
        "only with `extended=True`, *worse* says which values sort first. The numbers are defined in "
        "[What the numbers mean](../concepts.md).",
    ]
    described: dict[type[Any], str] = {}
    for report in sorted(kinds(), key=lambda each: each.kind):
        parts.append(f"## {report.kind}\n\n`{report.__name__}`.")
        for part, row in tables_of(report).items():
            if row in described:
                parts.append(f"**{part}**: rows of `{row.__name__}`, as in [{described[row]}](#{described[row]}).")
            else:
                described[row] = report.kind
                parts.append(f"**{part}**: rows of `{row.__name__}`.\n\n{_columns(row)}")
    return "\n\n".join(parts) + "\n"


def _columns(row: type[Any]) -> str:
    meanings = {**_alike(row), **descriptions(row)}
    lines = ["| column | header | type | worse | meaning |", "| --- | --- | --- | --- | --- |"]
    for each in (*columns_of(row), *derived_of(row)):
        said = meanings.get(each.name) or " ".join(
            (getattr(getattr(row, each.name, None), "__doc__", "") or "").split()
        )
        worse = each.worse if each.type in ("int", "float") else ""
        cells = (f"`{each.name}`", each.title, each.type, worse, ("*extended*. " if each.extended else "") + said)
        lines.append(_row(cells))
    return "\n".join(lines)


def _alike(row: type[Any]) -> dict[str, str]:
    """What is said of columns that are as others, which tooltips leave out."""
    formulas = f"by the formula of [`{row.__name__}`][{row.__module__}.{row.__name__}]"
    found = {}
    for names, text in re.findall(
        r"^ {4}([\w, ]+): (as .*(?:\n {8}.*)*)", inspect.cleandoc(row.__doc__ or ""), re.MULTILINE
    ):
        found.update(dict.fromkeys(names.split(", "), " ".join(text.replace("as above", formulas).split())))
    return found


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def files_page() -> str:
    """The format of a report file, field by field."""
    parts = [
        "# Report files",
        "`report.save(path)` writes one [safetensors](https://github.com/huggingface/safetensors) file, and "
        "`pt2qa.load(path)` reads it and checks every field. Nothing is unpickled. The header's metadata, texts by "
        "name, hold:",
        "\n".join(
            [
                f"- `{KIND}`: the kind of report, such as `layers`",
                f"- `{SCHEMA}`: the version of that kind's fields",
                f"- `{VERSION}`: the pt2qa that wrote it",
                f"- `{CHECKSUM}`: SHA-256 of the contents",
                "- the fields below that are not numbers in tables, as JSON",
            ]
        ),
        "A table, such as `rows`, is stored column by column: numbers as one-dimensional tensors `rows/NAME` (float64, "
        "int64 or bool), texts and shapes as JSON lists `rows/NAME`. Their columns are in "
        "[Columns of the reports](columns.md). A field that came with a later schema takes its default when an older "
        "file is read.",
    ]
    for kind in sorted(kinds(), key=lambda each: each.kind):
        lines = ["| field | type | since schema |", "| --- | --- | --- |"]
        types = {each.name: str(each.type) for each in fields(kind)}
        lines += [_row((f"`{name}`", f"`{_type(types, name)}`", str(codec.since))) for name, codec in _fields(kind)]
        parts.append(f"## {kind.kind}\n\nSchema {kind.schema}, read from {kind.oldest}.\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _fields(kind: Any) -> Iterable[tuple[str, Any]]:
    return codecs_of(kind).items()


def _type(types: Mapping[str, str], name: str) -> str:
    """The type of a field without its column description."""
    said = re.sub(r"^Annotated\[(.*), column\(.*\)\]$", r"\1", types[name])
    return re.sub(r"\b(?:npt|np)\.", "", said)
