"""``pt2qa html`` on the command line: the page, the exit code, and that it does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pt2qa
from pt2qa.cli import main
from tests.report.html import samples


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["html", *arguments], prog_name="pt2qa")


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    samples.layers().save("layers.safetensors")
    samples.findings().save("findings.safetensors")


def test_it_writes_all_reports_on_one_page() -> None:
    result = run("layers.safetensors", "findings.safetensors", "-o", "report.html")
    opens = "Next:\npython -m webbrowser -t report.html\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote report.html\n{opens}")
    pt2qa.write_html([samples.layers(), samples.findings()], "wanted.html")
    assert Path("report.html").read_text(encoding="utf-8") == Path("wanted.html").read_text(encoding="utf-8")


def test_help_teaches_with_an_example() -> None:
    result = run("--help")
    assert "    pt2qa html reports/*.safetensors -o report.html" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers.safetensors"], "Missing option '-o'"),
        (["-o", "report.html"], "Missing argument 'REPORT...'"),
        (["gone.safetensors", "-o", "report.html"], "gone.safetensors"),
        (["layers.safetensors", "-o", "nowhere/report.html"], "does not exist; create it first"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("report.html").exists()


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from pt2qa.cli import main\n"
        "main(['html', 'layers.safetensors', '-o', 'report.html'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
