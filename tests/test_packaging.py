"""What pip, make and the import system see is one and the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import entry_points, metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pt2qa

ROOT = Path(__file__).parent.parent


def of_extra(extra: str) -> list[Requirement]:
    """The requirements of an extra."""
    every = map(Requirement, requires("pt2qa") or [])
    return [each for each in every if str(each.marker) == f'extra == "{extra}"']


def made(variable: str) -> set[str]:
    """The words of a variable of the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(rf"^{variable} := (.*)$", text, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def test_the_version_is_the_same_everywhere() -> None:
    assert pt2qa.__version__ == version("pt2qa")
    assert f"\nversion: {pt2qa.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_make_installs_a_stack_that_the_package_takes() -> None:
    made_by_make = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    needed = [Requirement(line) for line in requires("pt2qa") or []]
    taken = {
        each.name: each.specifier.contains(made_by_make[each.name]) for each in needed if each.name in made_by_make
    }
    assert taken == {"torch": True, "torchao": True, "executorch": True}


def test_executorch_is_of_the_extras_that_lower_with_it_alone() -> None:
    found = {
        extra: [str(each.specifier) for each in of_extra(extra) if each.name == "executorch"]
        for extra in metadata("pt2qa").get_all("Provides-Extra") or []
    }
    assert found.pop("dev"), "it takes the other extras in"
    one = ["<1.6,>=1.4.1"]
    assert {extra: each for extra, each in found.items() if each} == {"arm": one, "xnnpack": one}


def test_make_installs_the_models_of_the_zoo_extra() -> None:
    pinned = {f"{each.name}{each.specifier}" for each in of_extra("zoo") if "==" in str(each.specifier)}
    assert pinned
    assert pinned < made("ZOO")


def test_the_command_and_the_plugins_are_installed() -> None:
    assert [entry.value for entry in entry_points(group="console_scripts", name="pt2qa")] == ["pt2qa.cli:main"]
    plugins = {entry.name: entry.value for entry in entry_points(group="pt2qa.quantizers")}
    assert plugins == {"tosa": "pt2qa_arm:PLUGIN", "x86": "pt2qa_x86:PLUGIN", "xnnpack": "pt2qa_xnnpack:PLUGIN"}


def test_packages_are_typed() -> None:
    packages = [ROOT / "pt2qa", *(ROOT / "quantizers").glob("pt2qa_*")]
    assert len(packages) == 8
    assert [package.name for package in packages if not (package / "py.typed").exists()] == []


def test_the_folder_of_the_plugins_is_no_package() -> None:
    assert not (ROOT / "quantizers" / "__init__.py").exists()


def planned(*arguments: str, cwd: Path = ROOT) -> str:
    """What make would do, whatever make and whatever variables run these tests."""
    given = {"VENV", "PYTHON", "CONSTRAINTS", "TORCH", "TORCHAO", "EXECUTORCH", "NNCF", "MFLAGS"}
    env = {name: text for name, text in os.environ.items() if name not in given and not name.startswith("MAKE")}
    command = ["make", "--dry-run", "-f", str(ROOT / "Makefile"), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("goal", ["demo", "check", "test", "zoo", "conformance", "bench", "package", "all"])
def test_make_knows_its_goals_from_anywhere(goal: str, tmp_path: Path) -> None:
    steps = planned(f"VENV={tmp_path}", goal, cwd=tmp_path)
    assert f'cd "{ROOT}"' in steps
    constrained = f'--constraint "{ROOT}/constraints.txt"'
    assert steps.index(f"{constrained} torch") < steps.index(f'{constrained} --editable ".[dev]"')


def test_make_tests_other_releases_in_an_environment_of_their_own() -> None:
    steps = planned("TORCH=2.15.0", "EXECUTORCH=1.5.1", "compat")
    place = ROOT / "build/python3-2.15.0-0.18.0-1.5.1"
    assert f'torch==2.15.0 torchao==0.18.0 executorch==1.5.1 > "{place}/constraints.txt"' in steps
    assert f'"{place}/venv/bin/python" -m pytest' in steps


# -- the package as it is published ------------------------------------------------------------------------------------

DEMO = """
import torch, pt2qa

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
batches = [torch.randn(4, 8) for _ in range(2)]
pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches, progress=False)
report = pt2qa.compare_layers(pair, batches, progress=False)
report.save("layers.safetensors")
pt2qa.write_html([report], "page.html")
print(pt2qa.__file__)
"""


@dataclass(frozen=True)
class Distributions:
    """What ``make package`` makes."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    # From a copy, whose files are all that there are.
    source, built = tmp_path_factory.mktemp("source") / "pt2qa", tmp_path_factory.mktemp("built")
    left = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "reports", "demo-reports")
    shutil.copytree(ROOT, source, ignore=left)
    run(sys.executable, "-m", "build", "--no-isolation", f"--outdir={built}", str(source), cwd=built)
    return Distributions(*(next(built.glob(f"pt2qa-{pt2qa.__version__}{end}")) for end in (".tar.gz", "-*.whl")))


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; it finds nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(distribution: Path, place: Path) -> Path:
    """The programs of an environment that has this distribution, and by a path file what it depends on."""
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    # Only a path: files that end with .pth there, as of an editable pt2qa, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", distribution, cwd=place)
    return python.parent


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_a_distribution_installs_into_an_empty_environment(kind: str, built: Distributions, tmp_path: Path) -> None:
    programs = installed(getattr(built, kind), tmp_path / "venv")
    assert run(programs / "pt2qa", "--version", cwd=tmp_path).startswith(f"pt2qa {pt2qa.__version__} (torch ")


def test_a_demo_runs_in_an_environment_with_the_wheel(built: Distributions, tmp_path: Path) -> None:
    programs, here = installed(built.wheel, tmp_path / "venv"), tmp_path / "elsewhere"
    here.mkdir()
    where = run(programs / "python", "-W", "ignore", "-c", DEMO, cwd=here).split()[-1]
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert "SQNR" in run(programs / "pt2qa", "show", "layers.safetensors", cwd=here)


def test_twine_finds_nothing_wrong_with_the_distributions(built: Distributions, tmp_path: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", built.sdist, built.wheel, cwd=tmp_path)


def test_a_wheel_holds_every_file_of_the_packages_and_no_other(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        path.relative_to(ROOT if folder == "pt2qa" else ROOT / folder).as_posix()
        for folder in ("pt2qa", "quantizers")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == files


def test_a_type_checker_finds_the_editable_install(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import pt2qa\nimport pt2qa_x86\nwrong: int = pt2qa.capture\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "own.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert re.search(r"own\.py:3: error: Incompatible types in assignment .*\nFound 1 error", done.stdout), done.stdout


def test_an_sdist_holds_what_make_test_needs(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    tracked = [
        path for folder in ("tests", "docs", "examples", "quantizers", "pt2qa") for path in (ROOT / folder).rglob("*")
    ]
    files = [path.relative_to(ROOT) for path in tracked if path.is_file() and "__pycache__" not in path.parts]
    assert [path for path in files if path not in held] == []
    assert {Path("Makefile"), Path("constraints.txt")} <= held


def test_class_variables_say_their_type_as_python_3_10_wants() -> None:
    sources = [path for folder in ("pt2qa", "quantizers") for path in sorted((ROOT / folder).rglob("*.py"))]
    plain = re.compile(r"^\s+\w+: ClassVar( =|$)", re.MULTILINE)
    assert [str(path) for path in sources if plain.search(path.read_text())] == []
