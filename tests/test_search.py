"""The search of the built site finds the page that answers a question, by the words that people type."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"
ASKED: dict[str, str] = yaml.safe_load((SITE / "asked.yml").read_text(encoding="utf-8"))

BUILD = """
import json
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
build(load_config(sys.argv[1], site_dir=sys.argv[2], plugins=json.loads(sys.argv[3])))
"""
"""Without the plugin that writes the reference from docstrings, which takes most of the time."""

QUERIES = {
    "accuracy dropped after quantization": "diagnose",
    "which layer is worst": "sensitivity",
    "keep layer in float": "overrides",
    "what does SQNR mean": "concepts",
    "pte differs": "deployed",
    "exit code": "gate",
    "fail the build": "gate",
    "flow file": "flow_file",
    "labels in my DataLoader": "flow_file",
    "mixed precision": "overrides",
    "json": "json",
    "Windows": "releases",
    "ONNX": "other_tools",
    "my model is bad in int8": "diagnose",
    "sensitive layers": "sensitivity",
    "out of memory": "benchmarks",
    "int16 activations": "overrides",
    "batch size": "flow_file",
    "last batch is smaller": "flow_file",
    "Hugging Face dataset": "flow_file",
    "android": "deployed",
    "CUDA": "devices",
    "LLM": "language_models",
    "KV cache": "language_models",
    "padding": "language_models",
    "error message": "common_errors",
    "outliers": "profile",
    "bias correction": "repair",
    "smoothquant": "repair",
    "csv": "reference/columns",
    "tensorboard": "html",
    "per channel or per tensor": "compare_quantizers",
    "quantization aware training": "quickstart",
    "getting started": "quickstart",
    "NNCF": "other_tools",
    "numeric suite": "numeric_suite",
    "custom metric": "custom_metric",
    "lint my model": "check",
    "unsupported op": "check",
    "speed up": "processes",
    "install": "releases",
    "qnn": "quantizers_of_others",
    "batch norm folding": "prepare",
    "target accuracy": "reconfigure",
    "worst images": "bad_cases",
    "saturation": "concepts",
    "torch.export.save": "save_and_reload",
    "pyproject": "flow_file",
    "quantize a transformer": "language_models",
    "values are clipped": "error_budget",
    "how many calibration samples": "flow_file",
    "show a report in Jupyter": "html",
    "compare two reports": "gate",
    "quantize only some layers": "overrides",
    "NaN after quantization": "diagnose",
    "int4 weights": "language_models",
    "dynamic quantization": "compare_quantizers",
    "export to executorch": "export_flows",
    "LSTM": "numeric_suite",
    "which images does it get wrong": "bad_cases",
    "model with several inputs": "flow_file",
    "is int8 faster": "deployed",
    "what does each column mean": "concepts",
    "torch.export fails": "common_errors",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="the search is JavaScript, which node runs")
def test_what_people_type_finds_the_page_that_answers_it(tmp_path: Path) -> None:
    own = (SITE / "mkdocs.yml").read_text(encoding="utf-8").partition("\nplugins:\n")[2].partition("  - offline\n")[0]
    plugins = json.dumps(yaml.safe_load(own))
    build = [sys.executable, "-W", "ignore", "-c", BUILD, str(SITE / "mkdocs.yml"), str(tmp_path), plugins]
    subprocess.run(build, capture_output=True, check=True, timeout=300)
    search = ["node", str(ROOT / "tests" / "search.mjs"), str(tmp_path), *QUERIES]
    found = json.loads(subprocess.run(search, capture_output=True, check=True, timeout=60).stdout)
    first = {query: (found[query] or ["nothing"])[0].rstrip("/") for query in QUERIES}
    assert {query: page for query, page in first.items() if page != QUERIES[query]} == {}


@cache
def nav() -> list[str]:
    text = (SITE / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return [
        page
        for part in yaml.safe_load(text)[1:]
        for entries in part.values()
        for each in entries
        for page in each.values()
    ]


def test_every_guide_says_which_question_it_answers() -> None:
    behind = ("design.md", "CHANGELOG.md", "CONTRIBUTING.md", "reference/")
    assert {page for page in nav() if not page.startswith(behind)} <= ASKED.keys() <= set(nav())
    questions = [text.split("; ")[0] for text in ASKED.values()]
    assert [each for each in questions if not each.endswith("?")] == []
    assert len(set(questions)) == len(questions)
