"""What mkdocs calls: adds the pages that are not files in ``docs``, and refuses pages that fetch something."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
sys.path.insert(0, str(HERE))

from notebooks import TUTORIALS, notebook_of  # noqa: E402
from reference import pages  # noqa: E402

ASKED: Final = {
    page: text.split("; ") for page, text in yaml.safe_load((HERE / "asked.yml").read_text(encoding="utf-8")).items()
}
"""By page its question, and what else people type."""

BEHIND: Final = ("design.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "reference/")
"""Pages that the search puts behind guides."""

_FETCHED: Final = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def on_files(files: Files, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Add the front page, which is the README, the other pages of the top folder, the reference, and notebooks."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, name, content=text))
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    for name in TUTORIALS:
        text = json.dumps(notebook_of((ROOT / "docs" / name).read_text(encoding="utf-8")), indent=1)
        files.append(File.generated(config, _notebook(name), content=text))
    for name in ("iframe-worker.js", "wide.css"):
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(HERE / name)))
    return files


def _notebook(page: str) -> str:
    return page.replace(".md", ".ipynb")


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Pages of ``docs`` reach the top folder by ``../``; in the site it is the same folder. Notebooks are linked.

    The question of a page stands below its title, and the search finds the page by it.
    """
    name = page.file.src_uri
    if name.startswith(BEHIND):
        page.meta["search"] = {"boost": 0.2}
    if name in ASKED:
        page.meta["tags"] = ASKED[name]
        title, _, rest = markdown.partition("\n\n")
        markdown = f'{title}\n\n<p class="question">{ASKED[name][0]}</p>\n\n{rest}'
    if name in TUTORIALS:
        title, _, rest = markdown.partition("\n\n")
        markdown = f"{title}\n\nThis page is also a [Jupyter notebook]({_notebook(name)}).\n\n{rest}"
    return re.sub(r"\]\(\.\./(README|CHANGELOG|CONTRIBUTING)\.md", lambda found: f"]({_SITE[found[1]]}", markdown)


_SITE: Final = {"README": "index.md", "CHANGELOG": "CHANGELOG.md", "CONTRIBUTING": "CONTRIBUTING.md"}


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    """Refuse a page that fetches a script, a style or a picture from elsewhere."""
    if fetched := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {fetched[0]}")
    return output
