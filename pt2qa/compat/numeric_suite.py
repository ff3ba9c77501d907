"""The functions of ``torch.ao.ns._numeric_suite``, for scripts that call them.

``import pt2qa.compat.numeric_suite as ns`` takes the place of the old import, and :func:`quantize` and
:func:`quantize_dynamic` that of torch's functions of these names.  What is different: nothing is added to the float
model, and only what is logged is kept; "float" is the model as prepare left it, its batch norms folded; a quantized
block is run on the float model's input, where Numeric Suite ran the float block on the quantized model's.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._report.set_apart import about_faults
from pt2qa._simulator.program import Step
from pt2qa.errors import SelectionError

Outputs = Tensor | tuple[Tensor, ...]
RECURRENT: Final = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn"}
"""What :func:`pt2qa.capture` decomposes, so that quantizers reach their linears."""


class Logger(nn.Module):
    """Base class of loggers: ``forward`` gets what it logs, and ``stats`` is what :func:`get_logger_dict` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {}


class OutputLogger(Logger):
    """Keeps each output, one a batch, in ``stats["tensor_val"]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stats["tensor_val"] = []

    def forward(self, x: Outputs) -> Outputs:
        """Logs what a module returns; several outputs are a tuple."""
        self.stats["tensor_val"].append(x)
        return x


class ShadowLogger(Logger):
    """Keeps what a quantized module and its float shadow return, one a batch; of several outputs the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stats.update(float=[], quantized=[])

    def forward(self, x: Outputs, y: Outputs) -> None:
        """Logs what the quantized module returns, and then the float one."""
        for side, value in (("quantized", x), ("float", y)):
            self.stats[side].append(value[0] if isinstance(value, tuple) else value)


class QuantizedModel(nn.Module):
    """A pair as the quantized model of these functions; a call runs the converted graph, and the loggers.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned.
    """

    def __init__(self, pair: QuantizedPair) -> None:
        super().__init__()
        check_pair(pair)
        self.pair = pair
        self.modules_logged: tuple[str | type, ...] = ()
        self.float_loggers: dict[str, Logger] = {}
        self.loggers: dict[str, Logger] = {}
        self._new_logger: Callable[[], Logger] = OutputLogger
        self._shadows = False

    def log(self, modules: Iterable[str | type], new_logger: Callable[[], Logger], *, shadows: bool) -> None:
        """Logs the calls of some modules from now on, and forgets what was logged.

        Args:
            modules: their paths or classes.
            new_logger: makes the loggers.
            shadows: whether modules run alone, on one input, with one logger for both sides; else the whole models run,
                with a logger for each.
        """
        self.modules_logged, self._new_logger, self._shadows = tuple(modules), new_logger, shadows
        if not self.modules_logged:
            raise SelectionError("no module to log: none was named, or the model has none within it")
        self.float_loggers, self.loggers = {}, {}

    def forward(self, *batch: Any) -> Any:
        """Runs one batch of positional inputs."""
        if self.modules_logged:
            for name, (reference, quantized, isolated) in _outputs_of(self.pair, batch, self.modules_logged).items():
                key = f"{name}.stats"
                if key not in self.loggers:
                    self.float_loggers[key], self.loggers[key] = self._new_logger(), self._new_logger()
                if self._shadows:
                    self.loggers[key](isolated, reference)
                else:
                    self.float_loggers[key](reference)
                    self.loggers[key](quantized)
        return self.pair.quantized(*batch)

    def state_dict(self) -> Weights:  # type: ignore[override]
        """Parameters by their names in the float model, dequantized: ``dequantize()`` of a float tensor is itself."""
        fused = set(self.leaves(fused=True))
        found = Weights()
        for constant in self.pair.program.constants:
            if isinstance(constant.reference, Tensor) and constant.attribute:
                module, _, attribute = constant.attribute.rpartition(".")
                outer = module.rpartition(".")[0]
                key = f"{outer if outer in fused else module}.{attribute}".lstrip(".")
                found[key], found.floats[key] = constant.quantized.detach(), constant.reference.detach()
        return found

    def leaves(self, *, fused: bool = False) -> list[str]:
        """The paths of the innermost modules, in graph order; of conv and relu that were fused, that of both.

        With ``fused``, of fused ones alone.
        """
        paths = dict.fromkeys(_leaf(step, fused) for step in self.pair.program.steps if step.site is None)
        return [path for path in paths if path and not any(other.startswith(f"{path}.") for other in paths)]


def _leaf(step: Step, fused: bool) -> str:
    inside = [path for _, path, kind in step.module_stack if ".intrinsic." in kind]
    return next(iter(inside), "" if fused else step.module)


class Weights(OrderedDict[str, Tensor]):
    """The state dict of a :class:`QuantizedModel`; ``floats`` are the values that were quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.floats: dict[str, Tensor] = {}


class _Keep(NamedTuple):
    """A metric that keeps the tensors of one batch; its number is their place in ``kept``."""

    kept: list[tuple[tuple[Tensor, ...], ...]]
    values: tuple[tuple[Tensor, ...], ...] = ()

    def update(self, reference: Tensor, quantized: Tensor, *, isolated: Tensor | None = None) -> _Keep:
        alone = quantized if isolated is None else isolated
        return self._replace(values=(*self.values, (reference.clone(), quantized.clone(), alone.clone())))

    def merge(self, other: _Keep) -> _Keep:
        return self._replace(values=(*self.values, *other.values))

    def compute(self) -> float:
        self.kept.append(self.values)
        return float(len(self.kept) - 1)


def _outputs_of(pair: QuantizedPair, batch: Any, modules: Collection[str | type]) -> dict[str, list[Any]]:
    """What each module returns in one batch: reference, quantized, and quantized on the reference's input."""
    kept: list[tuple[tuple[Tensor, ...], ...]] = []
    metric: Any = _Keep(kept)
    report = pt2qa.compare_modules(pair, [batch], modules=list(modules), metrics={"kept": metric}, progress=False)
    outputs: dict[str, list[tuple[Tensor, ...]]] = {}
    for row in report.rows:  # of a module with several outputs, `name[0]` and so on
        found = outputs.setdefault(re.sub(r"\[\d+\]$", "", row.name), [])
        for values in kept[int(row.custom["kept"])]:
            if not any(torch.equal(values[0], other[0]) for other in found):  # before and after it is rounded
                found.append(values)
    if report.batches_apart:
        raise pt2qa.BatchError(f"nothing is logged: {'; '.join(about_faults(report.set_apart, report.batches))}")
    return {
        name: [each if len(each) > 1 else each[0] for each in zip(*values, strict=True)]
        for name, values in outputs.items()
        if values
    }


def _quantized(model: Any) -> QuantizedModel:
    if not isinstance(model, QuantizedModel):
        raise SelectionError(
            f"the quantized model is of type {type(model).__name__}; expected what quantize or quantize_dynamic of "
            "pt2qa.compat.numeric_suite returned, or its QuantizedModel(pair)"
        )
    return model


def captured(model: nn.Module, example: Any, **options: Any) -> pt2qa.Capture:
    """:func:`pt2qa.capture` of a copy in eval mode, which these tools put a model in themselves."""
    return pt2qa.capture(copy.deepcopy(model).eval(), example, **options)


def default_eval_fn(model: Callable[[Any], Any], calib_data: Iterable[tuple[Any, Any]]) -> None:
    """Runs a model on the inputs of ``(input, target)`` items."""
    for data, _ in calib_data:
        model(data)


def quantize(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: Iterable[Any],
    *,
    inplace: Literal[False] = False,
    quantizer: Any = None,
    **options: Any,
) -> QuantizedModel:
    """Static quantization, calibrated on all that ``run_fn(model, *run_args)`` calls the model with.

    Args:
        model: it is not changed. Its ``qconfig`` is not read: the quantizer decides.
        run_fn: calls its first argument with batches of positional inputs.
        run_args: its other arguments.
        inplace: False: the quantized model is another object.
        quantizer: as for :func:`pt2qa.quantize`; None: that of the name of ``torch.backends.quantized.engine``.
        options: of :func:`pt2qa.capture`, such as ``dynamic_shapes``.

    Raises:
        BatchError: ``run_fn`` never called the model.
        SelectionError: ``inplace`` is True.
    """
    if inplace:
        raise SelectionError("inplace=True: a quantized graph cannot take the place of its float model")
    calls: list[tuple[Any, ...]] = []
    hook = model.register_forward_pre_hook(lambda _, args: calls.append(args))
    try:
        run_fn(model, *run_args)
    finally:
        hook.remove()
    if not calls:
        raise pt2qa.BatchError("run_fn did not call the model; expected one call a batch of calibration data")
    capture = captured(model, calls[0], **options)
    return QuantizedModel(pt2qa.quantize(capture, quantizer or torch.backends.quantized.engine, calls))


def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Collection[type[nn.Module]] | None = None,
    dtype: torch.dtype = torch.qint8,
    *,
    example: tuple[Any, ...],
    quantizer: Any = None,
) -> QuantizedModel:
    """Dynamic quantization of linears, and of those in the recurrent layers that ``qconfig_spec`` names.

    Args:
        model: it is not changed.
        qconfig_spec: ``nn.Linear`` and recurrent layers; None: all of them.
        dtype: ``torch.qint8``.
        example: one batch of positional inputs, which ``torch.export`` needs.
        quantizer: as for :func:`quantize`; None: its mode ``dynamic``.

    Raises:
        SelectionError: another dtype, or types that dynamic quantizers do not reach.
    """
    wanted = {nn.Linear, *RECURRENT} if qconfig_spec is None else set(qconfig_spec)
    if dtype != torch.qint8 or nn.Linear not in wanted or wanted - {nn.Linear, *RECURRENT}:
        raise SelectionError(
            f"dtype is {dtype} and qconfig_spec {qconfig_spec}; expected torch.qint8, and nn.Linear with or without "
            "nn.LSTM, nn.GRU and nn.RNN. For single modules, pass quantizer=pt2qa.quantizer(..., modules=...)."
        )
    kinds = [kind for layer, kind in RECURRENT.items() if layer in wanted]
    used = [kind for kind in kinds if any(type(each).__name__.lower() == kind for each in model.modules())]
    wanted_quantizer = quantizer or f"{torch.backends.quantized.engine}:mode=dynamic"
    return QuantizedModel(pt2qa.quantize(captured(model, example, decompose=used), wanted_quantizer, [example]))


def compare_weights(float_dict: Mapping[str, Tensor], quantized_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """``{"float": tensor, "quantized": tensor}`` for each weight that both state dicts have.

    Of a :class:`QuantizedModel`'s, "float" is the value that was quantized, with the batch norm folded into it.
    """
    floats = getattr(quantized_dict, "floats", float_dict)
    names = [name for name in quantized_dict if name.rpartition(".")[2].startswith("weight") and name in floats]
    return {name: {"float": floats[name], "quantized": quantized_dict[name]} for name in names}


def prepare_model_outputs(
    float_module: nn.Module,
    q_module: nn.Module,
    logger_cls: Callable[[], Logger] = OutputLogger,
    allow_list: Collection[str | type] | None = None,
) -> None:
    """Logs the outputs of all innermost modules, or of those of some types, from the next call of ``q_module`` on."""
    model = _quantized(q_module)
    model.log(model.leaves() if allow_list is None else allow_list, logger_cls, shadows=False)


def get_matching_activations(float_module: nn.Module, q_module: nn.Module) -> dict[str, dict[str, list[Tensor]]]:
    """What was logged at the same module of both models: by ``<module>.stats``, lists with one tensor a batch."""
    model = _quantized(q_module)
    both = {key: (model.float_loggers[key].stats, logger.stats) for key, logger in model.loggers.items()}
    return {
        key: {"float": floats["tensor_val"], "quantized": own["tensor_val"]}
        for key, (floats, own) in both.items()
        if own.get("tensor_val")
    }


def compare_model_outputs(
    float_model: nn.Module,
    q_model: nn.Module,
    *data: Any,
    logger_cls: Callable[[], Logger] = OutputLogger,
    allow_list: Collection[str | type] | None = None,
) -> dict[str, dict[str, list[Tensor]]]:
    """The outputs of the same modules of both models on one batch: see :func:`get_matching_activations`."""
    prepare_model_outputs(float_model, q_model, logger_cls, allow_list)
    q_model(*data)
    return get_matching_activations(float_model, q_model)


def prepare_model_with_stubs(
    float_module: nn.Module,
    q_module: nn.Module,
    module_swap_list: Collection[str | type],
    logger_cls: Callable[[], Logger],
) -> None:
    """Runs modules of some types alone, quantized and in float on one input, at each call of ``q_module``."""
    _quantized(q_module).log(module_swap_list, logger_cls, shadows=True)


def get_logger_dict(mod: nn.Module, prefix: str = "") -> dict[str, dict[str, Any]]:
    """The ``stats`` of all loggers of the quantized model, by ``<module>.stats``."""
    start = f"{prefix}." if prefix else ""
    return {f"{start}{key}": logger.stats for key, logger in _quantized(mod).loggers.items()}


def compare_model_stub(
    float_model: nn.Module,
    q_model: nn.Module,
    module_swap_list: Collection[str | type],
    *data: Any,
    logger_cls: Callable[[], Logger] = ShadowLogger,
) -> dict[str, dict[str, Any]]:
    """Quantized modules beside their float ones on the same input: see :func:`get_logger_dict`."""
    prepare_model_with_stubs(float_model, q_model, module_swap_list, logger_cls)
    q_model(*data)
    return get_logger_dict(q_model)
