"""The tests of ``etdumps.py`` in a process of their own: they load kernels that others expect to be missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).with_name("etdumps.py")


def test_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, cwd=TESTS.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
