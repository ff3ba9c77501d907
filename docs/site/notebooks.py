"""Tutorials as notebooks: a page's prose and code in cells, and what the page shows of the output as the output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

TUTORIALS: Final = ("digits.md", "test_your_quantizer.md")

_CODE: Final = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def notebook_of(page: str) -> dict[str, Any]:
    """A page of Markdown as a notebook of format 4.5, whose links lead to the pages of the site."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [{"id": f"cell-{number}", "metadata": {}, **cell} for number, cell in enumerate(_cells(page))]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _cells(page: str) -> Iterator[dict[str, Any]]:
    # Split by a pattern with two groups: prose, code, output or None, prose, code, ...
    prose, *rest = _CODE.split(page)
    yield from _prose(prose)
    for code, output, prose in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        shown = [] if output is None else [{"output_type": "stream", "name": "stdout", "text": output}]
        yield {"cell_type": "code", "source": code.rstrip(), "execution_count": None, "outputs": shown}
        yield from _prose(prose)


def _prose(text: str) -> Iterator[dict[str, Any]]:
    if text.strip():
        yield {"cell_type": "markdown", "source": re.sub(r"\]\((\w+)\.md", r"](\1.html", text.strip())}
