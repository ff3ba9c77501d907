"""Lowering to ExecuTorch's XNNPACK delegate, and running the program here.

The delegate is closed: its wheel has no event tracer.  So a second program is lowered that also returns the values to
be observed.  It is trusted only while its own outputs equal the first program's bit for bit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran, same_outputs

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa_xnnpack.etdump import Recorded

SCRIPT = """\
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime


def deployed(part, inputs):
    exported = torch.export.export(part, inputs, strict=False)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    return Runtime.get().load_program(lowered.buffer).load_method("forward").execute(inputs)
"""

MODEL, OBSERVED, INDEX = "model.pte", "observed.pte", "xnnpack.json"


@dataclass(frozen=True, kw_only=True)
class XNNPACKBackend:
    """ExecuTorch with the XNNPACK delegate, in the runtime of its Python package; see :class:`pt2qa.plugins.Backend`.

    >>> XNNPACKBackend().suffixes
    ('.pte', '.etdp')
    """

    etrecord: str = field(default="", metadata={"help": "the ETRecord of the program that wrote an ETDump (.etdp)"})

    name: ClassVar[str] = "ExecuTorch with XNNPACK"
    suffixes: ClassVar[tuple[str, ...]] = (".pte", ".etdp")
    saves: ClassVar[bool] = True
    script: ClassVar[str] = SCRIPT

    def missing(self) -> str:
        """Why programs cannot run here; empty if they can."""
        from pt2qa_xnnpack.internals import runtime

        if not runtime().backend_registry.is_available("XnnpackBackend"):
            return "this build of ExecuTorch has no XNNPACK delegate"
        return ""

    def lower(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        taps: Sequence[str],
        *,
        dynamic_shapes: tuple[Any, ...] | None,
        progress: Callable[[str], None],
    ) -> XNNPACKProgram:
        """Lowers the graph twice, as it is and with the taps as further outputs."""
        # ExecuTorch takes seconds to import.
        from pt2qa_xnnpack.lowering import lower

        return lower(graph, inputs, taps, dynamic_shapes, progress)

    def load(self, folder: Path) -> XNNPACKProgram:
        """Reads a folder that :meth:`XNNPACKProgram.save` wrote."""
        try:
            index = json.loads((folder / INDEX).read_text())
            return XNNPACKProgram(
                (folder / MODEL).read_bytes(),
                (folder / OBSERVED).read_bytes(),
                {str(name): int(position) for name, position in index["positions"].items()},
                {str(name): str(reason) for name, reason in index["lost"].items()},
                frozenset(map(int, index["delegated"])),
                tuple(map(str, index["facts"])),
                bool(index["stateful"]),
                int(index.get("written", 0)),  # earlier versions refused such programs
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeploymentError(
                f"{folder}: not a program that pt2qa saved ({type(error).__name__}: {error}). Lower the model again."
            ) from error

    def open(self, path: Path) -> XNNPACKProgram | Recorded:
        """A ``.pte`` file that was made elsewhere, or an ETDump, which a run of one recorded on any delegate."""
        if path.suffix == ".etdp":
            from pt2qa_xnnpack.etdump import read

            return read(path, Path(self.etrecord or path.with_name("etrecord.bin")))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DeploymentError(f"{path}: cannot be read: {error}") from error
        return XNNPACKProgram(data, facts=_facts(path, data))

    def record(self, path: Path, inputs: Path) -> tuple[str, ...]:
        """Bundles a ``.pte`` file with inputs, for ExecuTorch's runner; see :class:`pt2qa.plugins.Backend`."""
        from pt2qa_xnnpack.bundle import bundle

        return bundle(path, inputs)

    def inspect(self, path: Path) -> tuple[str, ...]:
        """What a ``.pte`` file holds, kernel by kernel, or an ETDump; see :class:`pt2qa.plugins.Backend`."""
        from pt2qa_xnnpack.artefact import kernels_of
        from pt2qa_xnnpack.internals import contents_of

        program = self.open(path)
        if not isinstance(program, XNNPACKProgram):
            return program.facts
        methods = {name: map(str, kernels_of(program.model, name)) for name in contents_of(program.model).methods}
        if len(methods) == 1:
            return (*program.facts, *next(iter(methods.values())))
        return (*program.facts, *(f"{name}: {line}" for name, lines in methods.items() for line in lines))


@dataclass(frozen=True)
class XNNPACKProgram:
    """A lowered model; see :class:`pt2qa.plugins.DeployedProgram`.

    Attributes:
        model: the program that ships, as the bytes of a ``.pte`` file.
        observed: the program that also returns the tapped values; empty if ``model`` returns them all.
        positions: by tap, which output of ``observed`` has its value.
        lost: by tap, why it cannot be observed.
        stateful: whether it writes to buffers; then each run loads it anew, and starts from the state in the file.
        written: to how many inputs it writes; ExecuTorch returns what it writes there before the outputs.
    """

    model: bytes = field(repr=False)
    observed: bytes = field(default=b"", repr=False)
    positions: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()
    facts: tuple[str, ...] = ()
    stateful: bool = False
    written: int = 0
    _loaded: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def taps(self) -> Mapping[str, str]:
        """Why each tap cannot be observed; empty for those that can."""
        return {**dict.fromkeys(self.positions, ""), **self.lost}

    @property
    def size(self) -> int:
        """Bytes of the file that ships."""
        return len(self.model)

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Runs both programs on a batch."""
        outputs = tuple(self._execute("model", inputs))
        if not self.positions:
            return Ran(outputs)
        every = self._execute("observed", inputs) if self.observed else outputs
        own = every[: len(outputs)]
        values = {name: every[position] for name, position in self.positions.items()}
        return Ran(outputs, values, changed=not same_outputs(outputs, own))

    def run_alone(self, inputs: Sequence[Any]) -> Ran:
        """Runs a batch with nothing observed."""
        return Ran(tuple(self._execute("model", inputs)))

    def differences(self, graph: GraphModule) -> list[tuple[Node, str, bool]]:
        """What it holds otherwise than a converted graph; see :class:`pt2qa.plugins.DeployedProgram`."""
        from pt2qa_xnnpack.artefact import differences

        return list(differences(self.model, graph))

    def save(self, folder: Path) -> None:
        """Writes ``model.pte``, ``observed.pte`` and an index."""
        (folder / MODEL).write_bytes(self.model)
        (folder / OBSERVED).write_bytes(self.observed)
        index = {
            "positions": dict(self.positions),
            "lost": dict(self.lost),
            "delegated": sorted(self.delegated),
            "facts": list(self.facts),
            "stateful": self.stateful,
            "written": self.written,
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1))

    def _execute(self, which: str, inputs: Sequence[Any]) -> Sequence[Any]:
        import torch

        contiguous = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in inputs]
        try:
            found: Sequence[Any] = self._method(which).execute(contiguous)
        except RuntimeError as error:
            told = [_with_reason(error, lambda: self._method(which).execute(contiguous))]
            told += [] if self.taps else self.facts
            raise DeploymentError(f"ExecuTorch loaded the program but could not run it: {'. '.join(told)}") from error
        return found[self.written :]

    def _method(self, which: str) -> Any:
        if which not in self._loaded or self.stateful:
            try:
                self._loaded[which] = self._load(which)
            except (RuntimeError, KeyError) as error:
                told = _with_reason(error, lambda: self._load(which))
                raise DeploymentError(f"ExecuTorch could not load the program: {told}") from error
        return self._loaded[which][1]

    def _load(self, which: str) -> tuple[Any, Any]:
        from pt2qa_xnnpack.internals import METHOD, runtime, without_counting

        program = runtime().load_program(self.model if which == "model" else self.observed)
        if METHOD not in program.method_names:
            raise DeploymentError(
                f"the program has no method {METHOD!r}, but {', '.join(sorted(program.method_names))}"
            )
        with without_counting():
            return program, program.load_method(METHOD)


def _with_reason(error: Exception, again: Callable[[], object]) -> str:
    """What ExecuTorch raised, and the reason, which only its log has."""
    from pt2qa_xnnpack.internals import printed_by

    reason = printed_by(again)
    return f"{error}: {reason}" if reason else str(error)


def _facts(path: Path, data: bytes) -> tuple[str, ...]:
    """What a file holds.

    Raises:
        DeploymentError: it is not a ``.pte`` file.
    """
    from pt2qa_xnnpack.internals import contents_of

    try:
        contents = contents_of(data)
    except Exception as error:
        raise DeploymentError(f"{path}: not a .pte file of ExecuTorch: {type(error).__name__}: {error}") from error
    delegates = Counter(contents.delegates)
    listed = ", ".join(f"{count} {name}" for name, count in delegates.items()) or "no delegate"
    portable = ", ".join(contents.operators) or "none"
    others = f"; methods: {', '.join(contents.methods)}" if len(contents.methods) > 1 else ""
    taken, returned = (", ".join(each) or "nothing" for each in (contents.inputs, contents.outputs))
    return (
        f"{path.name}: delegates: {listed}; ops outside: {portable}{others}",
        f"{path.name} takes {taken} and returns {returned}",
    )
