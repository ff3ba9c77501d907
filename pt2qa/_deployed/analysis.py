"""The comparison with the program that ships."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._check.analysis import check
from pt2qa._check.report import Finding
from pt2qa._deployed.apart import Apart, CrashError, RefusedError
from pt2qa._deployed.comparison import Comparison
from pt2qa._deployed.deployment import Lowerable, backend_for, lowerable, opened, program_for
from pt2qa._deployed.parts import crashing_ops
from pt2qa._deployed.recorded import RECORDED, RecordedOutputs
from pt2qa._deployed.report import DeployedReport
from pt2qa._graph.handles import name_of
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._ranks import alone, in_step
from pt2qa._report.notes import Note
from pt2qa._report.prose import few
from pt2qa._simulator.accumulate import accumulate, peeked, refuse_empty
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data, Mask
from pt2qa._trials.treatment import metric_name
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Backend, DeployedProgram, available, backend_of, rules_of


@in_step
@torch_defaults
def compare_deployed(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    backend: str | Backend | None = None,
    deployed: str | os.PathLike[str] | None = None,
    etrecord: str | os.PathLike[str] | None = None,
    program: str | os.PathLike[str] | None = None,
    apart: bool = False,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> DeployedReport:
    """Compares the kernels that ship with the converted graph, value by value.

    The converted graph is lowered to the backend, once as it is and once with further outputs, and run here. Each
    region of the converted graph is also run on the *deployed* values of its inputs: what still differs is the kernel's
    own doing, while a difference that has grown along the graph is nobody's.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.
        batches: iterable of batches, consumed once.
        backend: what lowers and runs it, by the name of its plug-in (``"xnnpack"``, ``"x86"``, ``"x86:isa=avx2"``);
            None: that of the pair's plug-in.
        deployed: a program that was made elsewhere, such as ``model.pte``, or outputs recorded on a device
            (``outputs.safetensors``, see :func:`pt2qa.record_inputs`): only outputs are compared, and what was recorded
            inside. A program is run by the backend that takes files with its suffix.
        etrecord: of ``deployed="etdump.etdp"``, the ETRecord that says which op wrote which value; None: the file
            ``etrecord.bin`` beside it.
        program: folder of the lowered program. If it exists, nothing is lowered; else it is written.
        apart: whether the backend lowers and runs the model in a process of its own. If native code dies in it, the
            error names the op, which is looked for by halves. It takes seconds more; ``pt2qa deploy`` does so.
        metric: a function of a model, larger is better, such as top-1 accuracy on your own data: measured of the model
            itself, the prepared and the converted graph, and the program.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        mask: which positions count, as in :func:`pt2qa.compare_layers`.
        progress: whether to show progress; None: if stderr is a terminal.

    Returns:
        The report.  After Ctrl-C, if at least one batch is finished, it covers the finished batches and says so.

    Raises:
        DeploymentError: no backend runs the model here, it cannot be lowered, or the program does not return what the
            model returns.
        BatchError: there is no batch, or one does not match the captured inputs or the mask.
        SimulationError: the simulator does not reproduce the converted graph.

    >>> [stage.name for stage in pt2qa.compare_deployed(pair, [x], progress=False).stages]
    ['eager', 'capture', 'prepared', 'converted', 'deployed']
    """
    alone("compare_deployed")
    check_pair(pair)
    if deployed is not None and program is not None:
        raise DeploymentError(
            "got deployed= and program=, expected one of them: a program built elsewhere is not lowered."
        )
    if metric is not None and deployed is not None and _path(deployed).suffix in RECORDED:
        raise DeploymentError(f"{deployed}: recorded outputs cannot be run, so metric= has no model. Leave it out.")
    first, data = peeked(Data("batches", batches, inputs_of, mask, progress), "compare on")
    chosen = backend_for(pair, backend, apart) if deployed is None else None
    with explained(pair, chosen, first):
        if chosen is None:
            place = Lowerable(pair.quantized, (), (), {})
            runs, name = opened(pair, _path(deployed), backend, apart, etrecord)
            if observe := getattr(runs, "observe", None):
                place = lowerable(pair)
                observe(place.graph, place.wanted)
        else:
            place = lowerable(pair)
            runs, name = program_for(pair, place, chosen, first, program, data.progress), chosen.name
        comparison = Comparison(pair, place, runs, name, mask)
        notes = accumulate(comparison, data, title="compare deployed", purpose="compare on")
    if isinstance(runs, RecordedOutputs) and not notes:
        runs.refuse_rest()
    refuse_empty(comparison.batches, comparison.health.set_apart)
    report = comparison.report(notes)
    if metric is not None and not notes:  # which say if it was interrupted
        try:
            report = replace(report, metric=metric_name(metric), stages=comparison.measured(metric))
        except KeyboardInterrupt:
            report = replace(report, notes=(*report.notes, Note("interrupted: no metric was measured", "interrupted")))
    if chosen is None:
        report = replace(report, facts=(*report.facts, *_read(pair, runs)))
    names = {row.name for row in report.suspects}
    # Notes are of what is by design, which the causes say where it is so.
    told = _found(pair, chosen, lambda each: each.name in names and each.severity != "note") if names else []
    return replace(report, notes=(*report.notes, *told))


def _read(pair: QuantizedPair, program: DeployedProgram) -> list[str]:
    """What an artefact holds otherwise than a pair, if its backend can read it."""
    differences = getattr(program, "differences", None)
    if differences is None:
        return []
    try:
        found = differences(pair.converted)
    except DeploymentError as error:
        return [f"not compared with what the pair holds: {error}"]
    told = [f"{name_of(node, pair.names) or node.name}: {what}" for node, what, *_ in found]
    if not told:
        return ["read, not run, it holds this pair's weights, biases, scales and limits"]
    made = "" if all(any(rest) for _, _, *rest in found) else ", so it was not made from it"
    return [f"read, not run, it holds something else than this pair{made}: {few(told)}"]


def _path(deployed: Any) -> Path:
    if not isinstance(deployed, str | os.PathLike):
        raise DeploymentError(
            f"deployed: got {type(deployed).__name__}, expected the path of a program such as model.pte, or of "
            "recorded outputs."
        )
    return Path(deployed)


@contextmanager
def explained(pair: QuantizedPair, backend: Backend | None, batch: Batch) -> Iterator[None]:
    """Adds to a failure of the backend what the check finds in the model, and of a process that died, which op did."""
    try:
        yield
    except RefusedError:
        raise
    except DeploymentError as error:
        told = []
        if isinstance(error, CrashError):
            ops = "" if backend is None else crashing_ops(pair, batch, backend)
            told.append(f"{ops}Nothing was compared.")
        if reasons := _found(pair, backend, lambda each: each.severity == "error"):
            told.append(f"The check finds in this model: {'; '.join(reasons)}")
        if not told:
            raise
        raise DeploymentError("\n".join((str(error), *told))) from error


def _found(pair: QuantizedPair, backend: Backend | None, counts: Callable[[Finding], bool]) -> list[str]:
    """What the check finds in a model by the rules about a backend's kernels."""
    backend = backend.backend if isinstance(backend, Apart) else backend
    plugins = (each for each in available().values() if backend is not None and type(backend_of(each)) is type(backend))
    if (plugin := next(plugins, None)) is None:
        return []
    # A rule of no plug-in that is about kernels, too.
    rules = [*(rule.id for rule in rules_of(plugin)), "bias-overflow"]
    lowered = pair if pair.origin is None else pair.origin.pair
    found = check(lowered, quantizer=plugin, rules=rules, progress=False).rows
    return [f"{each.name}: {each.why} ({each.rule})" for each in found if counts(each)]
