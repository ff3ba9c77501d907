"""Which cases a backend's kernels take, and the spec that follows from them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor
from tqdm import tqdm

import pt2qa
from pt2qa.plugins import Backend, BackendSpec, OpSpec, TensorSpec, backends, handle_of
from pt2qa_probe.cases import (
    ACTIVATIONS,
    FLOAT,
    INT32,
    JOINED,
    MOVES,
    OPS,
    WEIGHTED,
    Branches,
    Case,
    Rounds,
    is_static,
    ops_of,
    with_weight,
)

INT8: Final = TensorSpec("int8", "affine", None, -128, 127)
UINT8: Final = TensorSpec("uint8", "affine", None, 0, 255)
INT16: Final = TensorSpec("int16", "symmetric", None, -32767, 32767)
NARROW: Final = {"int8": (-64, 63), "uint8": (0, 127)}
"""A part of the range: a kernel that ignores it clamps elsewhere."""


def _narrow(spec: TensorSpec) -> TensorSpec:
    low, high = NARROW[spec.dtype]
    return replace(spec, quant_min=low, quant_max=high)


INPUTS: Final = (
    *((each, replace(each, scheme="symmetric"), _narrow(each)) for each in (INT8, UINT8)),
    (INT16,),
    *(
        (each, replace(each, scheme="symmetric"))
        for each in (replace(INT8, dynamic=True), replace(UINT8, dynamic=True))
    ),
    (FLOAT,),
)
"""What an op may read; of each kind, ways to round it: the first that is taken counts."""

WEIGHT: Final = TensorSpec("int8", "symmetric", 0, -127, 127)
AFFINE_WEIGHT: Final = TensorSpec("int8", "affine", 0, -128, 127)
WEIGHTS: Final = tuple(replace(each, axis=axis) for axis in (0, None, 1) for each in (WEIGHT, AFFINE_WEIGHT))
RANGES: Final = ((-128, 127), (-8, 7))
"""Other ranges of symmetric weights."""

Attempt = Callable[[Backend, Sequence[Case]], list[bool]]
"""Which cases the backend takes, of some that are lowered together. It raises Pt2qaError where that fails."""


def attempt(backend: Backend, cases: Sequence[Case]) -> list[bool]:
    """Lowers some cases as one model, runs it, and compares each output with that of the converted graph."""
    model = Branches(cases).eval()
    quiet, loud = ([each for case in cases for each in case.inputs(scale, 0)] for scale in (1.0, 1.3))
    capture = pt2qa.capture(model, tuple(quiet))
    pair = pt2qa.quantize(capture, Rounds(cases), [tuple(quiet)], progress=False)
    handles = [[handle_of(node) for node in ops] for ops in ops_of(capture.module())]
    graph = pair.quantized
    returned: Any = graph.graph.output_node().args[0]
    graph.graph.output_node().args = (tuple(returned),)
    graph.recompile()
    expected = graph(*loud)
    program = backend.lower(graph, quiet, (), dynamic_shapes=None, progress=lambda _: None)
    found = program.run(loud).outputs
    return [
        all(handle in program.delegated for handle in own) and _same(case, *both)
        for case, own, *both in zip(cases, handles, expected, found, strict=True)
    ]


def _same(case: Case, expected: Tensor, found: Tensor) -> bool:
    """Whether no integer is more than one step off; of a float output, whether what differs is small."""
    if case.static:
        step = expected.unique().diff().min()
        return float((found - expected).abs().max()) < 1.5 * float(step)
    return float((found - expected).abs().max() / expected.abs().mean()) < 0.05


@dataclass
class Probe:
    """What one backend takes.

    Attributes:
        backend: what lowers and runs the cases.
        attempt: does it.
        refused: by the op that is taken in no way, what the backend says.
    """

    backend: Backend
    attempt: Attempt = attempt
    refused: dict[str, str] = field(default_factory=dict)

    def taken(self, cases: Iterable[Case]) -> list[Case]:
        """Those that the backend takes. All are lowered together; if that fails, halves are."""
        cases = list(cases)
        if not cases:
            return []
        try:
            return [case for case, fits in zip(cases, self.attempt(self.backend, cases), strict=True) if fits]
        except pt2qa.Pt2qaError as error:
            if len(cases) == 1:
                self.refused.setdefault(cases[0].op, str(error).splitlines()[0])
                return []
        half = len(cases) // 2
        return self.taken(cases[:half]) + self.taken(cases[half:])

    def spec(self, ops: Sequence[str] = OPS, progress: bool | None = None) -> BackendSpec:
        """The spec of the ops that are taken in some way; ``refused`` has the others.

        Raises:
            SelectionError: there is no such op.
        """
        if unknown := [op for op in ops if op not in OPS]:
            raise pt2qa.SelectionError(f"no op to probe is named {unknown[0]!r}. Ops: {', '.join(OPS)}.")
        rows: list[OpSpec] = []
        disable = None if progress is None else not progress
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for ways in tqdm(INPUTS, desc=f"probe {self.backend.name}", disable=disable, leave=False):
                rows += self._rows(ways, ops)
        known = {op for row in rows for op in row.ops}
        why = "computed in float, or otherwise than the graph says"
        self.refused = {op: self.refused.get(op, why) for op in ops if op not in known}
        return BackendSpec(self.backend.name, merged(rows))

    def _rows(self, ways: Sequence[TensorSpec], ops: Sequence[str]) -> list[OpSpec]:
        """The ops that take one kind of input: one tensor after the other is rounded otherwise."""
        base = self._base(ways, ops)
        weighted, static = [case for case in base if case.op in WEIGHTED], [case for case in base if case.static]
        weights = self.taken(with_weight(case, weight) for weight in WEIGHTS for case in weighted)
        weights += self.taken(
            replace(case, weight=replace(case.weight, quant_min=low, quant_max=high))
            for case in weights
            if case.weight.scheme == "symmetric"
            for low, high in RANGES
        )
        # Float biases were tried first.
        others = [replace(case, bias=each) for case in weighted for each in _biases(case.read, case.weight)[1:]]
        biases = weighted + self.taken(case for case in others if case not in weighted)
        shorter = [case for case in static if case.read.dtype in NARROW]
        reads = self.taken(replace(case, read=_narrow(case.read)) for case in shorter)
        gives = self.taken(replace(case, given=_narrow(case.given)) for case in shorter if not case.one_scale)
        own = {case.op for case in self.taken(replace(case, one_scale=False) for case in base if case.one_scale)}
        joined = [replace(case, then=then) for case in static if case.op in JOINED for then in ACTIVATIONS]
        fused = self.taken(joined)
        apart = {(case.op, case.then) for case in self.taken(replace(case, apart=True) for case in fused)}
        found = []
        for case in base:
            op = case.op
            after = [each.then for each in fused if each.op == op]
            read = dict.fromkeys((case.read, *(each.read for each in reads if each.op == op)))
            given = dict.fromkeys((case.given, *(each.given for each in gives if each.op == op)))
            found.append(
                OpSpec(
                    ops=(op,),
                    mode=_mode(case.read),
                    input=tuple(read),
                    weight=_widest(each.weight for each in weights if each.op == op),
                    bias=tuple(each.bias for each in biases if each.op == op),
                    output=(tuple(read) if case.one_scale else tuple(given)) if case.static else (),
                    one_scale=case.one_scale and op not in own,
                    fused=tuple(then for then in after if (op, then) not in apart),
                    fusable=tuple(then for then in after if (op, then) in apart),
                )
            )
        return found

    def _base(self, ways: Sequence[TensorSpec], ops: Sequence[str]) -> list[Case]:
        """Of each op, the first way in which it is taken with such an input."""
        found: dict[str, Case] = {}
        for read in ways:
            given = replace(read, quant_min=-128, quant_max=127) if read.dtype == "int8" else read
            given = replace(read, quant_min=0, quant_max=255) if read.dtype == "uint8" else given
            for weight in (WEIGHT, replace(WEIGHT, axis=None)):
                for bias in _biases(read, weight):
                    tried = [Case(op, read, given, weight, bias) for op in ops if op in WEIGHTED]
                    if is_static(read) and (weight, bias) == (WEIGHT, FLOAT):
                        tried += [Case(op, read, given, one_scale=op in MOVES) for op in ops if op not in WEIGHTED]
                    found |= {case.op: case for case in self.taken(each for each in tried if each.op not in found)}
        return [found[op] for op in ops if op in found]


def _biases(read: TensorSpec, weight: TensorSpec) -> tuple[TensorSpec, ...]:
    """The ways to hold a bias: integers need a static scale of the input."""
    return (FLOAT, replace(INT32, axis=weight.axis)) if is_static(read) else (FLOAT,)


def _mode(read: TensorSpec) -> str:
    return "weight only" if read == FLOAT else f"{'dynamic ' if read.dynamic else ''}{read.dtype}"


def _widest(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Without those that an affine kernel takes, too."""
    every = list(specs)
    affine = {replace(each, scheme="symmetric") for each in every if each.scheme == "affine"}
    return tuple(each for each in every if each not in affine)


def merged(rows: Sequence[OpSpec]) -> tuple[OpSpec, ...]:
    """One row for ops that are taken alike; an op with one row has no mode."""
    groups: dict[OpSpec, list[str]] = {}
    for row in rows:
        (op,) = row.ops
        single = sum(op in other.ops for other in rows) == 1
        groups.setdefault(replace(row, ops=(), mode="" if single else row.mode), []).append(op)
    return tuple(replace(row, ops=tuple(ops)) for row, ops in groups.items())


def probe(backend: str | Backend, ops: Sequence[str] = OPS, *, progress: bool | None = None) -> BackendSpec:
    """What a backend's kernels take, found out by lowering tiny models, each with one op, and running them.

    An op is taken with some rounding of its tensors if the backend lowers it, says that its own kernels compute it, and
    gives the integers of the converted graph, to one step; or, of a float output, the value to 5 % of its mean. It is
    the beginning of a spec: read it before you rely on it.

    Args:
        backend: the name of its plug-in, or the backend.
        ops: of :data:`pt2qa_probe.cases.OPS`.
        progress: whether to show progress; None: if stderr is a terminal.

    Raises:
        DeploymentError: the backend cannot run here.
        SelectionError: there is no such op.
    """
    return Probe(named(backend)).spec(ops, progress)


def named(backend: str | Backend) -> Backend:
    """The backend of a name, which must be able to run here."""
    found: Any = backends().get(backend) if isinstance(backend, str) else backend
    if found is None:
        raise pt2qa.PluginError(f"no backend is named {backend!r}. Backends: {', '.join(backends())}.")
    if reason := found.missing():
        raise pt2qa.DeploymentError(f"{found.name} cannot run here: {reason}.")
    chosen: Backend = found
    return chosen


def code_of(spec: BackendSpec) -> str:
    """A spec as Python source that makes it; defaults are left out."""
    lines = "".join(f"        {_source(row)},\n" for row in spec.ops)
    return (
        "from pt2qa.plugins import BackendSpec, OpSpec, TensorSpec\n\n"
        f"SPEC = BackendSpec(\n    {spec.name!r},\n    (\n{lines}    ),\n)\n"
    )


def _source(value: Any) -> str:
    if isinstance(value, tuple):
        inside = ", ".join(map(_source, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = {each.name: (getattr(value, each.name), each.default) for each in dataclasses.fields(value)}
    said = ", ".join(f"{name}={_source(own)}" for name, (own, default) in fields.items() if own != default)
    return f"{type(value).__name__}({said})"
