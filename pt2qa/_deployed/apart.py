"""A backend in a process of its own: native code that dies there takes nobody else with it.

The process imports what it needs, and then forks for each program: one that dies is told of by the first, which has
run nothing native and is ready for the next. Requests are pickled: a method of the backend, which makes a program, or
of the program, and its arguments. The answer is what the method returns or raises.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import timeit
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from pt2qa._graph.internals.nodes import CUSTOM
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Backend, DeployedProgram

NAME = "pt2qa_name"
"""Under which a node's metadata keep its name, which export changes."""

METHODS = ("run", "run_alone", "save")
DATA = ("taps", "delegated", "facts", "size")


class CrashError(DeploymentError):
    """The process died."""


class RefusedError(DeploymentError):
    """The model or its backend cannot be passed to the process."""

    def __init__(self, why: BaseException | str) -> None:
        told = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        super().__init__(f"the model or its backend cannot be passed to a process of its own: {told}")


@dataclass(frozen=True)
class Apart:
    """A backend whose programs are lowered, and run, in a process of their own; see :class:`pt2qa.plugins.Backend`."""

    backend: Backend
    _spare: list[_Process] = field(default_factory=list, init=False, repr=False, compare=False)
    """Processes whose programs nobody has any more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "backend"), name)

    def lower(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        taps: Sequence[str],
        *,
        dynamic_shapes: tuple[Any, ...] | None,
        progress: Callable[[str], None],
    ) -> DeployedProgram:
        for node in graph.graph.nodes:
            node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), NAME: node.name}
        saved = io.BytesIO()
        try:
            with torch.no_grad():
                torch.export.save(torch.export.export(graph, tuple(inputs), dynamic_shapes=dynamic_shapes), saved)
        except Exception as error:
            raise RefusedError(error) from error
        return self._begun(progress, "lower", saved.getvalue(), list(inputs), list(taps), dynamic_shapes)

    def load(self, folder: Path) -> DeployedProgram:
        return self._begun(None, "load", folder)

    def open(self, path: Path) -> DeployedProgram:
        found: Any = self._begun(None, "open", path.absolute())
        if found.can_tell_differences:  # by reading the file, which loads there
            found.differences = lambda graph: self.backend.open(path).differences(graph)  # type: ignore[attr-defined]
        return found  # type: ignore[no-any-return]

    def _begun(self, progress: Callable[[str], None] | None, *request: Any) -> DeployedProgram:
        self._spare[:] = [process for process in self._spare if process.close.alive]
        if not self._spare:
            try:
                first = pickle.dumps((self.backend, torch.get_num_threads()))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RefusedError(error) from error
            self._spare.append(_Process(self.backend.name, first))
        process = self._spare[-1]
        process.ask("end")
        said: dict[str, Any] = process.ask(*request, progress=progress)
        self._spare.remove(process)
        methods = {name: functools.partial(process.ask, name) for name in said.pop("methods")}
        found: DeployedProgram = _Program(**said, **methods)
        weakref.finalize(found, self._spare.append, process)
        return found


class _Program(SimpleNamespace):
    """See :class:`pt2qa.plugins.DeployedProgram`."""


class _Process:
    """The process; it ends when nothing refers to this any more, and when Python ends."""

    def __init__(self, name: str, first: bytes) -> None:
        self.name, self.turn = name, threading.Lock()
        errors = self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
        self.close = weakref.finalize(self, _end, self._process, errors)
        self._send(first)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the missing answer says
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def ask(self, *request: Any, progress: Callable[[str], None] | None = None) -> Any:
        """What a request returns; a DeploymentError if it raised one, or if the process ended."""
        assert self._process.stdout is not None
        try:
            with self.turn:
                self._send(pickle.dumps(request))
                while (found := pickle.load(self._process.stdout))[0] == "progress":
                    if progress is not None:
                        progress(found[1])
        except EOFError:
            raise self._how_it_ended() from None
        except BaseException:
            self.close()
            raise
        kind, answer = found
        if kind == "died":
            named = signal.Signals(answer).name if answer in set(signal.Signals) else f"signal {answer}"
            raise CrashError(f"{self.name}: its process died ({named}) in {request[0]}()")
        if kind == "refused":
            raise RefusedError(answer)
        if kind == "error":
            raise DeploymentError(answer)
        return answer

    def _how_it_ended(self) -> DeploymentError:
        status = self._process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip()[-2000:]
        self.close()
        return DeploymentError(f"{self.name}: its process ended with status {status}: {said or 'it wrote no error'}")


def seconds_of(program: Any, inputs: Sequence[Any]) -> float:
    """What a batch takes where the program runs, without what passes between processes: the shortest of three runs."""
    if hasattr(program, "seconds"):
        return float(program.seconds(inputs))
    return min(timeit.repeat(lambda: program.run_alone(inputs), number=1, repeat=3))


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        assert pipe is not None
        with suppress(BrokenPipeError):  # what was not sent before it ended
            pipe.close()


# -- in the other process ----------------------------------------------------------------------------------------------


def _with_names(exported: Any) -> GraphModule:
    """The graph of a saved program, flat, with the names that its ops had."""
    module = exported.module(check_guards=False)
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        name = (node.meta.get(CUSTOM) or {}).pop(NAME, node.name)
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        copies[node].meta = node.meta
    return GraphModule(module, graph)


def serve() -> None:
    """Answers requests until the input ends."""
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401  # registers the ops of converted graphs

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints goes to the errors

    def answer(kind: str, value: Any) -> None:
        pickle.dump((kind, value), answers)
        answers.flush()

    backend, threads = pickle.load(sys.stdin.buffer)
    while True:
        try:
            method, *args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if method == "end":  # the program has ended already
            answer("returns", None)
        elif not (child := os.fork()):
            torch.set_num_threads(threads)
            _serve_program(backend, answer, method, args)
            os._exit(0)
        elif os.WIFSIGNALED(status := os.waitpid(child, 0)[1]):
            answer("died", os.WTERMSIG(status))
        elif status:
            sys.exit(1)


def _serve_program(backend: Backend, answer: Callable[[str, Any], None], method: str, args: list[Any]) -> None:
    """Makes a program, and answers requests to it."""
    try:
        if method == "lower":
            saved, inputs, taps, shapes = args
            try:
                graph = _with_names(torch.export.load(io.BytesIO(saved)))
            except Exception as error:
                answer("refused", f"{type(error).__name__}: {error}")
                return
            told = functools.partial(answer, "progress")
            program = backend.lower(graph, inputs, taps, dynamic_shapes=shapes, progress=told)
        else:
            program = getattr(backend, method)(*args)
    except DeploymentError as error:
        answer("error", str(error))
        return
    said = {name: getattr(program, name) for name in DATA if hasattr(program, name)}
    said["can_tell_differences"] = hasattr(program, "differences")
    answer("returns", {**said, "methods": ["seconds", *(name for name in METHODS if hasattr(program, name))]})
    while method != "end":
        try:
            method, *args = pickle.load(sys.stdin.buffer)
            run = functools.partial(seconds_of, program) if method == "seconds" else getattr(program, method, None)
            found = None if run is None else run(*args)
        except EOFError:
            return
        except DeploymentError as error:
            answer("error", str(error))
            continue
        answer("returns", found)


if __name__ == "__main__":
    serve()
