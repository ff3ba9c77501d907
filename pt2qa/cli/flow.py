"""A flow file: a Python file with a function that gives the command line a model, example inputs and batches."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from operator import itemgetter, length_hint
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pt2qa
from pt2qa._printable import question
from pt2qa.cli.batches import Fit, Inputs, Part, Sizes, as_call, sizes_of
from pt2qa.cli.group import file_of, plan_in, say
from pt2qa.errors import BatchError, FlowError, SelectionError

REQUIRED: Final = ("model", "example_inputs", "batches")
OPTIONAL: Final = (
    *("inputs_of", "targets_of", "dynamic_shapes", "evaluation", "mask", "metric", "target", "classes", "overrides"),
    "as_deployed",
)


@dataclass(frozen=True, slots=True)
class Flow:
    """The checked result of a flow function.

    ``args`` and ``kwargs`` are example inputs; ``batches``, for calibration, and ``evaluation``, for measuring, can be
    read again and again.  ``mask`` says which positions count: the name of an input, or a function of a batch.
    ``metric`` is a function of a model, larger is better; a number as ``target`` is in its unit.  ``classes`` are names
    of the classes, ``labelled`` pairs of an evaluation batch and its labels, ``overrides`` a plan for the quantizer
    that it was made for.  With ``as_deployed``, pairs compute as the backend's kernels do.  ``sizes`` are those that
    vary without ``dynamic_shapes`` of the function.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: Iterable[Any]
    evaluation: Iterable[Any]
    dynamic_shapes: Any = None
    metric: Callable[[Any], float] | None = None
    target: Any = None
    mask: str | Callable[[Any], Any] | None = None
    classes: Sequence[str] | None = None
    overrides: Any = None
    labelled: Iterable[tuple[Any, Any]] | None = None
    as_deployed: bool = True
    sizes: Sizes | None = None

    @property
    def same_data(self) -> bool:
        """Whether it measures on the data that it calibrates on."""
        return _data(self.evaluation) is _data(self.batches)

    def plan_for(self, spec: str, plan: Any = None) -> Any:
        """A plan, or else the flow's own, if that was made for this quantizer; else None, which it says."""
        from pt2qa.plugins import describe, resolve

        own = self.overrides
        if plan is not None or own is None or own.quantizer in ("", describe(resolve(spec))):
            return own if plan is None else plan
        return say(f"the overrides of the flow are for {own.quantizer}, and are not applied to {spec}")

    def quantized(self, spec: str, plan: Any = None, capture: Any = None) -> Any:
        """The pair of a quantizer, with a plan or the flow's own."""
        plan = self.plan_for(spec, plan)
        pair = pt2qa.quantize(self.capture() if capture is None else capture, spec, self.batches, overrides=plan)
        return pair.as_deployed() if self.as_deployed else pair

    def bad_cases(self, pair: Any, k: int) -> Any:
        """The :class:`pt2qa.BadCases` of a pair on the evaluation data, with the flow's own labels and names."""
        if self.labelled is None:
            return pt2qa.find_bad_cases(pair, self.evaluation, k=k, mask=self.mask, classes=self.classes)
        parts: dict[str, Any] = {"inputs_of": itemgetter(0), "targets_of": itemgetter(1)}
        return pt2qa.find_bad_cases(pair, self.labelled, k=k, mask=self.mask, classes=self.classes, **parts)

    def target_of(self, text: str | None) -> Any:
        """The :class:`pt2qa.Target` that ``text`` asks for, or the flow's own; None without one.

        A number is a target for the flow's metric, in its unit, or dB without a metric; ``sqnr>=30`` is always dB.
        """
        # Imported here, because other commands of the command line do not need torch.
        from pt2qa._trials.treatment import metric_name, read_target

        wanted: Any = self.target if text is None else _number(text)
        target = None if wanted is None else read_target(wanted)
        if target is None or self.metric is None or target.metric is not None or isinstance(wanted, str):
            return target
        return replace(target, metric=self.metric, name=metric_name(self.metric))

    def fitted(self) -> Flow:
        """The flow with dimensions dynamic in which its batches differ, which it says; it reads all batches once."""
        loaders = (self.batches,) if self.evaluation is self.batches else (self.batches, self.evaluation)
        found = sizes_of(self.args, self.kwargs, loaders) if self.dynamic_shapes is None else None
        if found is None:
            return self
        say(f"batches differ in size ({found}): captured with dynamic_shapes for these dimensions")
        args, kwargs = found.example
        return replace(self, args=args, kwargs=kwargs, dynamic_shapes=found.dynamic_shapes(), sizes=found)

    def capture(self) -> Any:
        """The model's :class:`pt2qa.Capture`."""
        capture = pt2qa.capture(self.model, self.args, self.kwargs, dynamic_shapes=self.dynamic_shapes)
        if self.sizes is not None:
            try:
                capture.check_batch(*self.sizes.other)
            except BatchError as error:
                raise FlowError(
                    f"batches differ in size ({self.sizes}), and the model computes with one size as a constant: give "
                    "all batches one size, as with drop_last=True in a DataLoader, or take sizes from the input's "
                    "shape in forward"
                ) from error
        return capture


def part_of(flow: Flow, part: int, parts: int) -> Flow:
    """The flow with a part of its data."""
    batches = Part(flow.batches, part, parts)
    other = batches if flow.evaluation is flow.batches else Part(flow.evaluation, part, parts)
    labelled = None if flow.labelled is None else Part(flow.labelled, part, parts)
    return replace(flow, batches=batches, evaluation=other, labelled=labelled)


def load_flow(where: str) -> Flow:
    """Run the function that ``FLOW.py:function`` names, or ``flow`` without one, and check what it returns.

    The file's folder is added to ``sys.path``, as when Python runs the file, so that it can import its neighbours.  The
    function takes no arguments and returns ``(model, example_inputs, batches)``, the same with ``inputs_of`` as a
    fourth value, or a dict with these names and others of :data:`OPTIONAL`.  ``example_inputs`` is a tensor, a tuple of
    positional inputs or a dict of keyword inputs; items of the batches are given their form, see
    :class:`pt2qa.cli.batches.Fit`.
    """
    path, name = file_and_function(where)
    function = _function(_module(path), path, name)
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise FlowError(f"{where} failed: {_told(error, path)}") from error
    values = dict.fromkeys(OPTIONAL) | _named(result, where)
    for part, (fits, expected) in _parts().items():
        if not (fits(values[part]) or (part in OPTIONAL and values[part] is None)):
            raise FlowError(f"{where}: {part}: got {_kind(values[part])}, expected {expected}")
    given, other, inputs_of = values["batches"], values["evaluation"], values["inputs_of"]
    args, kwargs = as_call(values["example_inputs"])
    fit = Fit(args, kwargs)
    batches = _batches(given, f"{where}: batches", inputs_of, fit)
    same = other is None or other is given
    evaluation = batches if same else _batches(other, f"{where}: evaluation", inputs_of, fit)
    metric = values["metric"] and _checked(values["metric"], where, path)
    plan = values["overrides"]
    if plan is not None and not isinstance(plan, pt2qa.OverridePlan):
        plan = plan_in(path.parent / plan)
    labelled = values["targets_of"] and _labelled(
        given if same else other, f"{where}: targets_of", inputs_of, values["targets_of"], fit
    )
    more = values["dynamic_shapes"], metric, values["target"], values["mask"], values["classes"], plan, labelled
    flow = Flow(
        values["model"], args, kwargs, batches, evaluation, *more, as_deployed=values["as_deployed"] is not False
    )
    try:
        flow.target_of(None)
    except SelectionError as error:
        raise FlowError(f"{where}: {error}") from error
    return flow


@contextmanager
def own_part(where: str) -> Iterator[tuple[Flow, bool]]:
    """A flow with this process's part of its data, and whether this is the process that prints and writes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield load_flow(where).fitted(), True
        return
    import torch
    import torch.distributed as dist

    # It imports torch._dynamo, which keeps a reference to a group that is there before; the threads of the group would
    # then live until the process ends, and now and then abort it.
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401

    if torch.accelerator.is_available():
        # So that "cuda" is another device in each process.
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    dist.init_process_group("gloo")
    try:
        with ExitStack() as stack:
            ranks = stack.enter_context(pt2qa.distributed())
            if ranks.rank:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            yield part_of(load_flow(where).fitted(), ranks.rank, ranks.size), ranks.rank == 0
    finally:
        dist.destroy_process_group()


def measured_on(flow: Flow) -> Any:
    """What a quantized model is measured on; says so if that is what it was calibrated on."""
    if flow.same_data:
        say(
            "calibration and measurement use the same data, which hides errors on other data; "
            "return evaluation=, other batches, from the flow function"
        )
    return flow.evaluation


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _data(batches: Any) -> Any:
    """The data behind loaders, of which two may read the same."""
    while isinstance(batches, Inputs | Part):
        batches = batches.loader
    return getattr(batches, "dataset", batches)


def file_and_function(where: str) -> tuple[Path, str]:
    """The file in ``FLOW.py:function``, and the function; without one, ``flow``."""
    path = file_of(where)
    name = where[len(path) + 1 :] if len(path) < len(where) else "flow"
    if (not path.endswith(".py") and not Path(path).is_file()) or not name.isidentifier():
        raise FlowError(f"got {where!r}, expected FLOW.py, or FLOW.py:function, for example examples/digits.py:flow")
    if not Path(path).is_file():
        raise FlowError(f"{path}: no such file; expected a Python file with a function {name!r}")
    return Path(path).resolve(), name


def _module(path: Path) -> ModuleType:
    name = f"pt2qa_flow_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise FlowError(f"{path}: not a Python file: its name must end in .py")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    # Registered as by an import, because dataclasses and pickle look up a class's module by name.
    sys.modules[name] = module
    try:
        # From its text: a cached compilation is taken for an edit of the same length and second.
        exec(spec.loader.source_to_code(path.read_bytes(), str(path)), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise FlowError(f"{path.name} cannot be loaded: {_told(error, path)}") from error
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if function is None:
        here = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        hint = question(name, here) or f"it has {', '.join(here) or 'no functions'}"
        raise FlowError(f"{path.name} has no function {name!r}; {hint}")
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise FlowError(f"{path.name}:{name}: expected a function that takes no arguments ({error})") from error
    return function  # type: ignore[no-any-return]  # a module's attribute is Any; it was just checked


def _named(result: Any, where: str) -> dict[str, Any]:
    if isinstance(result, Mapping):
        known = REQUIRED + OPTIONAL
        if unknown := [str(name) for name in result if name not in known]:
            hint = question(unknown[0], known) or f"expected {', '.join(known)}"
            raise FlowError(f"{where} returned a dict with {unknown[0]!r}; {hint}")
        if missing := [name for name in REQUIRED if name not in result]:
            raise FlowError(f"{where} returned a dict without {missing[0]!r}; expected {', '.join(REQUIRED)}")
        return dict(result)
    if isinstance(result, tuple) and len(result) in (3, 4):
        return dict(zip((*REQUIRED, "inputs_of"), result, strict=False))
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else _kind(result)
    raise FlowError(f"{where} returned {got}; expected (model, example_inputs, batches), or a dict with these names")


def _parts() -> dict[str, tuple[Callable[[Any], bool], str]]:
    # Imported here, because other commands of the command line do not need torch.
    import torch

    return {
        "model": (lambda given: isinstance(given, torch.nn.Module), "a torch.nn.Module"),
        "example_inputs": (
            lambda given: (
                isinstance(given, torch.Tensor | tuple)
                or (isinstance(given, dict) and all(isinstance(name, str) for name in given))
            ),
            "a tensor, a tuple of positional inputs, or a dict of keyword inputs",
        ),
        "inputs_of": (callable, "a function from a loader's item to a batch"),
        "targets_of": (callable, "a function from a loader's item to its integer labels"),
        "metric": (
            lambda given: callable(given) and not isinstance(given, type),
            "a function from a model to a number",
        ),
        "mask": (
            lambda given: isinstance(given, str) or callable(given),
            "the name of an input or a function from a batch to a bool tensor of shape (samples, positions)",
        ),
        "classes": (
            lambda given: isinstance(given, list | tuple) and all(isinstance(name, str) for name in given),
            "a list of the classes' names, in the order of the model's scores",
        ),
        "overrides": (
            lambda given: isinstance(given, str | os.PathLike | pt2qa.OverridePlan),
            "a pt2qa.OverridePlan, or the file of one, from the folder of the flow",
        ),
        "as_deployed": (lambda given: isinstance(given, bool), "True or False"),
    }


def _batches(batches: Any, where: str, inputs_of: Callable[[Any], Any] | None, fit: Fit) -> Iterable[Any]:
    import numpy as np
    import torch

    if isinstance(batches, torch.Tensor | np.ndarray | Mapping | str | bytes):
        raise FlowError(f"{where}: got one {_kind(batches)}, expected several batches; put it in a list")
    if not isinstance(batches, Iterable) and not (hasattr(batches, "__getitem__") and hasattr(batches, "__len__")):
        hint = "; call it" if callable(batches) else ""
        raise FlowError(f"{where}: got {_kind(batches)}, expected a list or a DataLoader of batches{hint}")
    if isinstance(batches, Iterator):
        raise FlowError(
            f"{where}: got {_kind(batches)}, which can be read only once, but calibration and each "
            "analysis need the batches again; return a list, or a loader that starts over such as a DataLoader"
        )
    # A DataLoader over an IterableDataset has __len__, but no length.
    if length_hint(batches, 1) == 0:
        raise FlowError(f"{where}: got an empty {_kind(batches)}, expected at least one batch")
    given = Inputs(batches, inputs_of or (lambda item: item))
    first = _first(given, where)
    say(*(f"{where}: {line}" for item in first for line in fit.said_of(item)))
    if all(fit(item) is item for item in first):
        return batches if inputs_of is None else Inputs(batches, inputs_of)
    if isinstance(batches, list | tuple):  # held in memory, as analyses can tell
        return [fit(item) for item in given]
    return Inputs(batches, lambda item: fit(given.inputs_of(item)))


def _labelled(
    items: Any, where: str, inputs_of: Callable[[Any], Any] | None, targets_of: Callable[[Any], Any], fit: Fit
) -> Inputs:
    """The batches of a loader with their labels."""
    given = Inputs(items, lambda item: (fit(item if inputs_of is None else inputs_of(item)), targets_of(item)))
    _first(given, where)
    return given


def _first(given: Inputs, where: str) -> list[Any]:
    """The first item, in a list; reading it draws none of the caller's random numbers."""
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            return list(itertools.islice(given, 1))
    except Exception as error:
        raise FlowError(f"{where}: the first item fails: {_kind(error)}: {error}") from error


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _checked(metric: Callable[[Any], Any], where: str, path: Path) -> Callable[[Any], float]:
    """The metric, with errors that name it."""
    import torch

    @functools.wraps(metric)
    def measured(model: Any) -> float:
        try:
            value = metric(model)
        except Exception as error:
            raise FlowError(f"{where}: metric failed: {_told(error, path)}") from error
        try:
            return float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise FlowError(f"{where}: metric returned {value!r:.60}, expected a number; larger is better") from error

    return measured


def _told(error: BaseException, path: Path) -> str:
    """An error in the user's file as one phrase, with the line that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    place = f" ({path.name}, line {line})" if line else ""
    return f"{_kind(error)}: {text}{place}"
