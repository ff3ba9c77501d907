"""What pip, make and the import system see is one and the same."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest

import pt2qa

ROOT = Path(__file__).parent.parent


def pins(extra: str | None) -> set[str]:
    """The requirements ``name==version`` of the package itself or of one of its extras."""
    mark = 'extra == "{}"'
    wanted = [
        line for line in requires("pt2qa") or [] if (mark.format(extra) in line if extra else "extra ==" not in line)
    ]
    return {line.partition(";")[0].strip().lower() for line in wanted if "==" in line.partition(";")[0]}


def made(variable: str) -> set[str]:
    """The words of a variable of the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(rf"^{variable} := (.*)$", text, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def test_the_version_is_the_same_everywhere() -> None:
    assert pt2qa.__version__ == version("pt2qa")


def test_make_installs_the_torch_that_the_package_needs() -> None:
    assert made("TORCH") <= pins(None)


def test_make_installs_the_models_of_the_zoo_extra() -> None:
    assert pins("zoo") < made("ZOO")


def test_the_command_and_the_plugins_are_installed() -> None:
    assert [entry.value for entry in entry_points(group="console_scripts", name="pt2qa")] == ["pt2qa.cli:main"]
    plugins = {entry.name: entry.value for entry in entry_points(group="pt2qa.quantizers")}
    assert plugins == {"x86": "pt2qa_x86:PLUGIN", "xnnpack": "pt2qa_xnnpack:PLUGIN"}


@pytest.mark.parametrize("package", ["pt2qa", "quantizers/pt2qa_x86", "quantizers/pt2qa_xnnpack"])
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_wheels_hold_every_file_that_the_code_reads() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]\n")[2].partition("\n\n")[0]
    declared = {name: re.findall(r'"([^"]+)"', patterns) for name, patterns in re.findall(r'"([^"]+)" = (.*)', text)}
    assert declared["*"] == ["py.typed", "*.pyi"]
    data = [path for path in (ROOT / "pt2qa").rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    for path in data:
        package = ".".join(path.relative_to(ROOT).parent.parts)
        assert any(fnmatch(path.name, pattern) for pattern in declared["*"] + declared.get(package, [])), path


def test_the_folder_of_the_plugins_is_no_package() -> None:
    assert not (ROOT / "quantizers" / "__init__.py").exists()


@pytest.mark.parametrize("goal", ["demo", "check", "test", "zoo", "conformance", "bench", "all"])
def test_make_knows_its_goals_from_anywhere(goal: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", "-f", str(ROOT / "Makefile"), f"VENV={tmp_path}", goal]
    steps = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f'cd "{ROOT}"' in steps
    assert steps.index("torch==2.13.0") < steps.index(".[dev]")
