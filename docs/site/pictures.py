"""Takes the pictures of the documentation, with the browser that the variable CHROME names: ``make pictures``."""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pt2qa  # noqa: E402
from examples.digits import flow  # noqa: E402

FOLDER: Final = ROOT / "docs" / "pictures"
TABLE: Final = '<body style="margin:16px;background:#fff"><pre style="font:14px monospace">{}</pre></body>'


def browser() -> str:
    """The browser's command.

    Raises:
        SystemExit: there is none.
    """
    found = os.environ.get("CHROME") or shutil.which("chromium") or shutil.which("google-chrome")
    return found or sys.exit("no browser found: make pictures CHROME=/path/to/chromium")


def take(page: Path, picture: Path, width: int, height: int) -> None:
    """Show a page and save what is in the window, width × height pixels."""
    options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}")
    command = [browser(), *options, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def first_run(folder: Path) -> Path:
    """The page of the first run of three_runs.md, made in a folder."""
    text = (FOLDER.parent / "three_runs.md").read_text(encoding="utf-8")
    (folder / "net.py").write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "quantizers")]),
        "PYTHONWARNINGS": "ignore",
    }
    for command in (
        "net.py",
        "-m pt2qa init cells.pt --model net.py --data cells.npz",
        "-m pt2qa fix flow.py -q xnnpack -o fixed",
    ):
        subprocess.run([sys.executable, *command.split()], cwd=folder, env=env, check=True, capture_output=True)
    return folder / "fixed" / "report.html"


def main() -> None:
    """The HTML page of the digits demo, its table in a terminal, and the page of the first of three runs."""
    given = flow()
    batches = given["batches"]
    pair = pt2qa.quantize(pt2qa.capture(given["model"], given["example_inputs"]), "xnnpack", batches)
    layers = pt2qa.compare_layers(pair, batches)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page, table = Path(folder, "page.html"), Path(folder, "table.html")
        pt2qa.write_html([layers, pt2qa.compare_weights(pair)], page)
        table.write_text(TABLE.format(html.escape(layers.table(width=100))), encoding="utf-8")
        take(page, FOLDER / "page.png", 1200, 690)
        take(table, FOLDER / "table.png", 880, 300)
        take(first_run(Path(folder)), FOLDER / "first_run.png", 1200, 655)
    for picture in sorted(FOLDER.glob("*.png")):
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
