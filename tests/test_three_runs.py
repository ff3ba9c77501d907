"""docs/three_runs.md is typed again, in an empty folder, and prints what the page shows but for numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import blocks_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "three_runs.md"
PIP = f"{sys.executable} -m pip install -q --no-deps --no-build-isolation --target site"


def words(text: str) -> str:
    """A text in one line, with each number as 0."""
    return re.sub(r"[+-]?\d+(\.\d+)?", "0", " ".join(text.split()))


@pytest.mark.zoo
def test_what_is_typed_prints_what_the_page_shows(tmp_path: Path) -> None:
    paths = [str(ROOT), str(ROOT / "quantizers"), str(tmp_path / "site")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
    env = {**os.environ, **own, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    code, *consoles = [block for block in blocks_of(PAGE) if block.language in ("python", "console")]
    (tmp_path / "net.py").write_text(code.text, encoding="utf-8")
    shown = [entry for block in consoles for entry in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]]
    assert len(shown) == 14
    last = 0
    for entry in shown:
        command, _, expected = entry.partition("\n")
        typed = command.replace("pip install", PIP).replace("$?", str(last))
        done = subprocess.run(["bash", "-c", f"{typed} 2>&1"], cwd=tmp_path, env=env, capture_output=True, text=True)
        last, printed = done.returncode, words(done.stdout)
        assert last == int(command.startswith("pt2qa gate")), done.stdout
        for piece in expected.split("…"):
            assert words(piece) in printed, f"{command}: the page shows {piece!r}; printed is\n{done.stdout}"
