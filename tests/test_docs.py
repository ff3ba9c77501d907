"""The Python blocks of README.md and docs/ run, page by page: what a page shows is what the reader gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))) if path.exists()]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share their names, in the order in which they stand, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__page__"}
    for block in BLOCK.finditer(text):
        # As many empty lines as stand above, so that a traceback gives the line of the page.
        above = "\n" * (text.count("\n", 0, block.start()) + 1)
        exec(compile(above + block[1], str(page), "exec"), names)
