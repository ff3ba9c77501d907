"""Lowering and running in a process of its own, whose oneDNN is limited to fewer instructions.

The process serves one program: it reads a request from each line of its input and answers with a line.  Graphs and
tensors pass through files.  See :mod:`pt2qa_x86.worker` for its side.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran
from pt2qa_x86.backend import NOT_SAVED, HasPackage

GRAPH, INPUTS, RESULT, ERRORS = "graph.pt2", "inputs.pt", "result.pt", "stderr.txt"


def lower_apart(
    graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str], dynamic_shapes: tuple[Any, ...] | None, isa: str
) -> ProgramApart:
    """A program that was lowered, and runs, in a process of its own.

    Args:
        graph: the converted graph with marks.
        inputs: an example batch, flat.
        taps: the nodes to observe.
        dynamic_shapes: for each input, as for ``torch.export.export``.
        isa: the limit of oneDNN.
    """
    process = _Process(isa)
    try:
        with torch.no_grad():
            exported = torch.export.export(graph, tuple(inputs), dynamic_shapes=dynamic_shapes)
        torch.export.save(exported, process.folder / GRAPH)
    except Exception as error:
        process.close()
        raise DeploymentError(
            f"the converted graph cannot be passed to a process of its own: {type(error).__name__}: {error}"
        ) from error
    torch.save(list(inputs), process.folder / INPUTS)
    return ProgramApart(process, process.ask({"do": "lower", "taps": list(taps)}))


def open_apart(path: Path, isa: str) -> PackageApart:
    """A package of AOTInductor that runs in a process of its own."""
    process = _Process(isa)
    return PackageApart(process, process.ask({"do": "open", "path": str(path.absolute())}), path)


@dataclass
class ProgramApart:
    """A program in another process; see :class:`pt2qa.plugins.DeployedProgram`."""

    process: _Process
    said: Mapping[str, Any]

    @property
    def taps(self) -> Mapping[str, str]:
        """Why each tap cannot be observed; empty for those that can."""
        return dict(self.said["taps"])

    @property
    def delegated(self) -> frozenset[int]:
        """Handles of the ops that oneDNN's kernels compute."""
        return frozenset(self.said["delegated"])

    @property
    def facts(self) -> tuple[str, ...]:
        """What ran."""
        return tuple(self.said["facts"])

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs a batch in the other process."""
        with self.process.turn:
            torch.save(list(inputs), self.process.folder / INPUTS)
            self.said = self.process.ask({"do": "run"})
            outputs, values = torch.load(self.process.folder / RESULT, weights_only=True)
        return Ran(tuple(outputs), values)

    def save(self, folder: Path) -> None:
        """Refuses."""
        raise DeploymentError(f"{folder}: {NOT_SAVED}")


@dataclass
class PackageApart(ProgramApart, HasPackage):
    """A package of AOTInductor in another process."""

    path: Path


class _Process:
    """The process and its folder; both go when nothing refers to this any more, and when Python ends."""

    def __init__(self, isa: str) -> None:
        self.isa = isa.upper()
        self.turn = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="pt2qa-x86-"))
        limits = {"ONEDNN_MAX_CPU_ISA": self.isa, "ATEN_CPU_CAPABILITY": isa}
        with (self.folder / ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pt2qa_x86.worker", str(self.folder), str(torch.get_num_threads())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **limits},
                start_new_session=True,  # Ctrl-C is for this process, which then ends the other
            )
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _end, self._process, self.folder)

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a request.

        Raises:
            DeploymentError: the other process raised one, or ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        line = ""
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
        except (BrokenPipeError, ValueError):
            pass  # it has ended, which the missing answer says
        except BaseException:
            self.close()
            raise
        if not line:
            raise DeploymentError(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DeploymentError(f"with {self.isa}: {answer['error']}")
        return answer

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        errors = self.folder / ERRORS
        said = errors.read_text(errors="replace").strip() if errors.exists() else ""
        self.close()
        return (
            f"the process with {self.isa} ended with status {self._process.returncode}: "
            f"{said[-2000:] or 'it wrote no error'}"
        )


def _end(process: subprocess.Popen[str], folder: Path) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was not sent before it ended
                pipe.close()
    shutil.rmtree(folder, ignore_errors=True)
