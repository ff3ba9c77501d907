"""No behaviour hangs on the wording of a text: tests pass with every sentence of the package garbled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REWORDED = '''
from typing import Literal

Kind = Literal["dead code"]

def note(count):
    """Says how many."""
    return f"interrupted: covers the {count} batches that were finished"

def is_interrupted(text):
    return text.startswith("interrupted: covers the")

def kind():
    return "dead code"
'''


def test_what_reads_a_sentence_does_not_survive_and_what_reads_a_kind_does() -> None:
    script = (
        "import ast, sys, tests.reworded as r; rewording = r.Rewording({'dead code'}); names = {}; "
        "exec(compile(rewording.visit(ast.parse(sys.stdin.read())), 'm', 'exec'), names); "
        "print(rewording.garbled, names['is_interrupted'](names['note'](3)), names['kind'](), names['note'].__doc__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=REWORDED, capture_output=True, text=True, cwd=_ROOT, check=False
    )
    assert done.stdout == "3 False dead code Says how many.\n", done.stderr


def test_merging_and_files_of_earlier_versions_do_not_hang_on_wording() -> None:
    text = "test_the_command_prints_and_writes_what_the_call_returns"  # it asserts what an error says
    again = "-1]"  # the same with other shards
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "tests.reworded",
        "tests/merge",
        "tests/report/test_earlier_files.py",
        "-k",
        f"not {text} and not {again}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


_ROOT = Path(__file__).parents[1]
