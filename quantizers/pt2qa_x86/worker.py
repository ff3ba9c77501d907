"""The process that :mod:`pt2qa_x86.process` starts: ``python -m pt2qa_x86.worker FOLDER THREADS``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchao.quantization.pt2e.lowering  # noqa: F401  # registers the ops of converted graphs

from pt2qa.errors import DeploymentError
from pt2qa.plugins import DeployedProgram
from pt2qa_x86.backend import open_package
from pt2qa_x86.lowering import lower
from pt2qa_x86.process import GRAPH, INPUTS, RESULT


def serve(folder: Path) -> None:
    """Answers requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the errors
    program: DeployedProgram | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if request["do"] == "run":
                assert program is not None, "a program comes before its batches"
                ran = program.run(_inputs(folder))
                torch.save((list(ran.outputs), dict(ran.values)), folder / RESULT)
            else:
                program = _program(request, folder)
            answer = {
                "taps": dict(program.taps),
                "delegated": sorted(program.delegated),
                "facts": list(program.facts),
            }
        except DeploymentError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _program(request: Mapping[str, Any], folder: Path) -> DeployedProgram:
    if request["do"] == "open":
        return open_package(Path(request["path"]))
    graph = torch.export.load(folder / GRAPH).module(check_guards=False)
    return lower(graph, _inputs(folder), request["taps"])


def _inputs(folder: Path) -> list[Any]:
    found: list[Any] = torch.load(folder / INPUTS, weights_only=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    serve(Path(sys.argv[1]))
