"""What ``pip install pt2qa`` downloads: the wheel, built as ``make package`` builds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.bars import Result

ROOT = Path(__file__).parents[2]
WHEEL_BAR_MB = 1.5


def measure_wheel() -> list[Result]:
    """The size of the wheel, packed and unpacked."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "source"), Path(folder, "built")
        # From a copy, whose files are all that there are.
        left = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
        shutil.copytree(ROOT, source, ignore=left)
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", f"--outdir={built}", str(source)]
        subprocess.run(command, check=True, capture_output=True)
        wheel = next(built.glob("*.whl"))
        shutil.unpack_archive(wheel, built / "unpacked", format="zip")
        unpacked = sum(path.stat().st_size for path in (built / "unpacked").rglob("*") if path.is_file())
        return [
            Result("wheel", wheel.stat().st_size / 1e6, "MB", WHEEL_BAR_MB),
            Result("wheel, unpacked", unpacked / 1e6, "MB"),
        ]
