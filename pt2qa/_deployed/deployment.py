"""Lowering a pair to its backend: the graph, the values to observe in it, and programs kept in a folder or given."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from tqdm import tqdm

from pt2qa._capture.inputs import detached, device_of
from pt2qa._deployed.apart import Apart
from pt2qa._deployed.recorded import RECORDED, SUFFIX, read_outputs
from pt2qa._exclusion import exports
from pt2qa._graph.handles import copy_nodes
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import dynamic_dimensions
from pt2qa._printable import did_you_mean
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import few
from pt2qa._report.rows import installed
from pt2qa._simulator.batches import Batch, as_batch, flat_outputs, is_tensor
from pt2qa._simulator.program import QuantParams, Step
from pt2qa._simulator.verification import add_state
from pt2qa.errors import DeploymentError, PluginError
from pt2qa.plugins import Backend, DeployedProgram, Ran, backend_of, backends, unavailable
from pt2qa.plugins.options import parse_options, with_options

_B = TypeVar("_B", bound=Backend)
INDEX = "pt2qa.json"
_ELSEWHERE = (
    "Run the model where it runs: pt2qa record-inputs (pt2qa.record_inputs) writes the inputs, and "
    "compare_deployed(deployed='outputs.safetensors') compares what was recorded there."
)


@dataclass(frozen=True, slots=True)
class ObservedValue:
    """A value to observe.

    Attributes:
        step: the step of the simulator that computes it: a site, or an op whose output nothing rounds.
        name: of the op, as reports show it, or of the model input.
        owner: the op's own step; None for a model input.
        node: the name of its node in the graph that is lowered: a quantize node, or the op.
        params: how its integers are dequantized; None for a float value.
        dtype: of what they are dequantized to.
        refused: why it cannot be observed on any backend; empty if it can.
    """

    step: Step
    name: str
    owner: Step | None
    node: str
    params: QuantParams | None
    dtype: torch.dtype = torch.float32
    refused: str = ""

    def value(self, observed: Tensor) -> Tensor:
        """A new tensor with what readers of an observed value get: integers dequantized as the converted graph does."""
        if self.params is None or observed.is_floating_point():
            return observed.clone()
        scale, zero_point = self.params.scale, self.params.zero_point
        assert isinstance(scale, float), "a value with several scales is not observed"
        assert isinstance(zero_point, int)
        return observed.to(self.dtype).sub_(zero_point).mul_(scale)


@dataclass(frozen=True, slots=True)
class Lowerable:
    """The converted graph with nodes of its own and flat inputs and outputs, and the values to observe in it."""

    graph: GraphModule
    values: tuple[ObservedValue, ...]
    fused: tuple[tuple[Step, str], ...]
    """Ops without a value of their own, each with the last op of its kernel."""
    original: Mapping[str, str]
    """By the name of a node in this graph, that in the pair's quantized graph; copying renames some."""

    @property
    def wanted(self) -> dict[str, str]:
        """By the name of each node to observe, that of its op in reports."""
        return {observed.node: observed.name for observed in self.values if not observed.refused}

    @property
    def digest(self) -> str:
        """Identifies the graph with its constants, scales and values to observe."""
        digest = hashlib.sha256()
        number = {node: str(position) for position, node in enumerate(self.graph.graph.nodes)}
        for node in self.graph.graph.nodes:
            args = torch.fx.map_arg((node.args, node.kwargs), lambda used: f"%{number[used]}")
            digest.update(f"{node.op} {node.target} {args}\n".encode())
        add_state(digest.update, self.graph)
        digest.update(" ".join(self.wanted).encode())
        return digest.hexdigest()[:16]

    def dynamic_shapes(self) -> tuple[Any, ...] | None:
        """The sizes that may vary, by input, as for ``torch.export.export``; None if all are fixed."""
        values = [node.meta.get(VALUE) for node in self.graph.graph.find_nodes(op="placeholder")]
        shapes = dynamic_dimensions(values)
        return shapes if any(shapes) else None


def lowerable(pair: QuantizedPair) -> Lowerable:
    converted = pair.converted
    graph = copy_nodes(converted)
    names = dict(zip((node.name for node in converted.graph.nodes), graph.graph.nodes, strict=True))
    if pair.origin is not None:
        names = {own: names[name] for own, name in pair.origin.names.items()}
    output = graph.graph.output_node()
    output.args = (tuple(leaf for leaf in flat_outputs(output.args[0]) if is_tensor(leaf)),)
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    original = {node.name: name for name, node in names.items()}
    steps = pair.program.steps
    fused = [(steps[at], steps[region.steps[-1]].name) for region in pair.program.regions for at in region.steps[:-1]]
    return Lowerable(graph, tuple(_observed(pair, names)), tuple(fused), original)


def _observed(pair: QuantizedPair, names: dict[str, Node]) -> Iterator[ObservedValue]:
    program = pair.program
    owners = {step.out: step for step in program.steps if step.site is None}
    # Dynamic scales are computed inside the kernel that reads the value, so the value is observed before.
    rounded = {
        step.reads[0] for step in program.steps if step.site is not None and not program.sites[step.site].params.dynamic
    }
    last = {region.steps[-1] for region in program.regions}
    sites = {step.out for step in program.steps if step.site is not None}
    for step in program.steps:
        if step.site is not None:
            params = program.sites[step.site].params
            # What is rounded once more is seen where it is read.
            if params.dynamic or step.duplicate_of is not None or step.reads[0] in sites:
                continue
            quantize = names[step.node].args[0]
            assert isinstance(quantize, Node), "a dequantize node reads what a quantize node writes"
            single = isinstance(params.scale, float) and isinstance(params.zero_point, int)
            refused = "" if single else f"it has no single scale ({params.dtype})"
            dtype: Any = names[step.node].kwargs.get("out_dtype") or torch.float32
            name, owner = program.name_of(step.reads[0]), owners.get(step.reads[0])
            yield ObservedValue(step, name, owner, quantize.name, params, dtype, refused)
        elif step.index in last and step.out not in rounded:
            node = names[step.node]
            value = node.meta.get(VALUE)
            if isinstance(value, Tensor) and value.is_floating_point():
                yield ObservedValue(step, step.name, step, node.name, None)


def inputs_for(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of flat inputs, so that no backend can write to the caller's."""
    return tuple(map(detached, values))


class OtherProgramError(DeploymentError):
    """A folder holds the program of another model, data or version."""


def backend_for(pair: QuantizedPair, wanted: str | Backend | None, apart: bool = False) -> Backend:
    """The backend that runs a pair here: ``wanted``, or that of the pair's plug-in; ``apart`` in its own process."""
    _refuse_elsewhere(pair)
    found, who = _wanted(pair, wanted)
    if found is None:
        raise DeploymentError(
            f"{who} names no backend. Name one, as in backend='onnxruntime'. {_installed()} {_ELSEWHERE}"
        )
    return Apart(_ready(found)) if apart else _ready(found)


def opened(
    pair: QuantizedPair, path: Path, wanted: str | Backend | None, apart: bool, etrecord: Any
) -> tuple[DeployedProgram, str]:
    """A program that was made elsewhere, or the outputs recorded there, and what a report calls its backend."""
    _refuse_elsewhere(pair)
    if path.suffix == SUFFIX and path.is_file():
        if wanted is not None:
            raise DeploymentError(f"{path}: recorded outputs are not run: omit backend={wanted!r}.")
        return read_outputs(path), "recorded outputs"
    others = backends().values() if wanted is None else ()
    known = [each for each in (_wanted(pair, wanted)[0], *others) if each is not None]
    if not path.is_file():
        raise DeploymentError(f"{path}: no such file. {_accepted(known)}")
    found = next((each for each in known if path.suffix in each.suffixes), None)
    if found is None:
        raise DeploymentError(f"{path}: no installed backend runs such a file. {_accepted(known)} {_ELSEWHERE}")
    found = with_options(found, {} if etrecord is None else {"etrecord": os.fspath(etrecord)})
    is_run = path.suffix not in RECORDED
    return (Apart(_ready(found)) if apart and is_run else _ready(found)).open(path), found.name


def lines_from_backend(path: Path, method: str, *args: Any) -> tuple[str, ...]:
    """What an optional method of a backend says of a file with one of its suffixes; only to ``inspect``, recordings."""
    readers: list[Any] = [each for each in backends().values() if hasattr(each, method)]
    recorded = () if method == "inspect" else RECORDED
    suffixes = {suffix: each for each in readers for suffix in each.suffixes if suffix not in recorded}
    if path.suffix not in suffixes:
        raise DeploymentError(f"{path}: no installed backend reads such a file. Expected {few(sorted(suffixes))}.")
    return tuple(getattr(_ready(suffixes[path.suffix]), method)(path, *args))


def _wanted(pair: QuantizedPair, wanted: str | Backend | None) -> tuple[Backend | None, str]:
    if wanted is None:
        plugin = pair.plugin if pair.recipe is None else pair.recipe.plugin
        return (None if plugin is None else backend_of(plugin)), f"quantizer {pair.quantizer!r}"
    if not isinstance(wanted, str):
        return wanted, repr(wanted)
    name, _, options = wanted.partition(":")
    found = backends().get(name)
    if found is None:
        raise PluginError(f"no backend is named {name!r}{did_you_mean(name, backends())} {_installed()}")
    return with_options(found, parse_options(found, options)), f"backend {wanted!r}"


def _installed() -> str:
    broken = "".join(f" Not loaded: {reason}." for reason in unavailable().values())
    return f"Backends: {', '.join(backends()) or 'none'}.{broken}"


def _ready(found: _B) -> _B:
    if reason := found.missing():
        raise DeploymentError(f"{found.name} cannot run here: {reason}. {_ELSEWHERE}")
    return found


def _refuse_elsewhere(pair: QuantizedPair) -> None:
    device = device_of(pair.reference)
    if device is not None and device.type != "cpu":
        raise DeploymentError(
            f"the pair is on {device}, and what its backend computes is compared on the CPU. Capture and quantize the "
            "model on the CPU."
        )


def _accepted(backends: Sequence[Backend]) -> str:
    names = dict.fromkeys((suffix, each.name) for each in backends for suffix in each.suffixes)
    listed = "".join(f"{suffix} ({name}), " for suffix, name in names)
    return f"Expected {listed}or {SUFFIX} (outputs recorded elsewhere)."


@exports
def run_program(program: DeployedProgram, values: Sequence[Any], observed: bool = True) -> Ran:
    """Runs a batch, flat.  A program may be lowered anew for inputs of another shape, which exports."""
    run = program.run if observed else getattr(program, "run_alone", program.run)
    return run(inputs_for(values))


@exports
def program_for(
    pair: QuantizedPair,
    lowerable: Lowerable,
    backend: Backend,
    batch: Batch,
    path: str | os.PathLike[str] | None,
    progress: bool | None,
) -> DeployedProgram:
    """The lowered program of a pair: read from the folder if it is there, else lowered, and written to it.

    It is lowered with the example inputs of the capture, or with the batch if the capture is not known.
    """
    folder = None if path is None else Path(path)
    if folder is not None and folder.exists():
        _check_index(folder, lowerable, backend)
        return backend.load(folder)
    if folder is not None and not backend.saves:
        raise DeploymentError(
            f"{folder}: programs of {backend.name} cannot be written to a folder: leave out program=."
        )
    example = batch if pair.capture is None else as_batch(pair.capture.args, pair.capture.kwargs, pair.quantized)
    with _written(folder, lowerable, backend) as made:
        with tqdm(total=0, bar_format="{desc} {elapsed}", disable=None if progress is None else not progress) as bar:
            program = backend.lower(
                lowerable.graph,
                inputs_for(pair.values(example)),
                tuple(lowerable.wanted),
                dynamic_shapes=lowerable.dynamic_shapes(),
                progress=lambda what: bar.set_description_str(f"{pair.model}: {what}"),
            )
        if made is not None:
            program.save(made)
    return program


@contextmanager
def _written(folder: Path | None, lowerable: Lowerable, backend: Backend) -> Iterator[Path | None]:
    """A new folder for the program, which gets its name when all is in it; if another process was first, its stays.

    It is made before the lowering, which takes long, so that no work is lost where nothing can be written.
    """
    if folder is None:
        yield None
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            yield made
            (made / INDEX).write_text(json.dumps(_index(lowerable, backend), indent=1))
            made.chmod(0o755)
            if folder.exists():
                _check_index(folder, lowerable, backend)
            else:
                os.rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise DeploymentError(f"{folder}: the lowered program cannot be written: {error}") from error


def _check_index(folder: Path, lowerable: Lowerable, backend: Backend) -> None:
    try:
        found = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise DeploymentError(
            f"{folder}: not a lowered program of pt2qa ({type(error).__name__}: {error}). Give a folder that does not "
            "exist yet, or one that an earlier compare_deployed(program=...) wrote."
        ) from error
    wanted = _index(lowerable, backend)
    differing = [key for key, value in wanted.items() if not isinstance(found, dict) or found.get(key) != value]
    if differing:
        was = ", ".join(f"{key} {found.get(key)!r}, now {wanted[key]!r}" for key in differing)
        raise OtherProgramError(
            f"{folder}: lowered from something else ({was}). Give another folder to lower this model, or remove it."
        )


def _index(lowerable: Lowerable, backend: Backend) -> dict[str, str]:
    packages = {package: installed(package) for package in ("torch", "torchao", "executorch")}
    return {"backend": backend.name, "graph": lowerable.digest, **packages}
