"""The config of each linear: the fewest bytes that meet a target, or the best quality that fits into a budget."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import PerGroup, quantize_

import pt2qa
from pt2qa.errors import SelectionError
from pt2qa_torchao import code

STEPS = 4096
"""Into how many steps the search divides the bytes between the smallest and the largest model."""


@dataclass(frozen=True)
class MixedConfig:
    """A config for each linear, applied and measured.

    Attributes:
        code: source that quantizes the float model, ``model``, in place; it was executed, and the rest measured on what
            it made.
        configs: the config of each linear by its name; None keeps it in float.
        pair: the capture with the model that the code made.
        sqnr: of its worst output, dB.
        value: what the target asks for: dB, or the number of its metric.
        nbytes: of the parameters: integers at their own width, scales, zero points other than 0, and what stays float.
        met: whether the target is met within the budget.
        trials: how many models were measured.
    """

    code: str = field(repr=False)
    configs: Mapping[str, Any] = field(repr=False)
    pair: pt2qa.QuantizedPair = field(repr=False)
    sqnr: float
    value: float
    nbytes: int
    met: bool
    trials: int

    def __str__(self) -> str:
        floats = sum(config is None for config in self.configs.values())
        return (
            f"# {'met' if self.met else 'NOT met'}: {self.value:.4g} ({self.sqnr:.1f} dB), {self.nbytes:,} bytes, "
            f"{floats} of {len(self.configs)} linears in float, {self.trials} models measured\n{self.code}"
        )


@dataclass(frozen=True)
class _Option:
    """What a linear may get: its bytes beyond those of the float model, and its noise in the outputs."""

    config: Any
    nbytes: int
    noise: float


def mixed_config(
    capture: pt2qa.Capture,
    configs: Sequence[Any],
    batches: Iterable[Any],
    *,
    target: pt2qa.Target | float | None = None,
    max_bytes: int | None = None,
    filter_fn: Callable[[nn.Module, str], bool] = lambda module, name: isinstance(module, nn.Linear),
    inputs_of: Callable[[Any], Any] | None = None,
    mask: str | Callable[[Any], Any] | None = None,
    progress: bool | None = None,
) -> MixedConfig:
    """Chooses a config of torchao's ``quantize_``, or float, for each linear.

    Each config is applied to the whole model once, and :func:`pt2qa.sensitivity` measures the noise of each linear with
    it.  As noise adds up, this gives the choice with the least noise for each number of bytes.  The smallest one that
    meets the target is found by trying models that ``quantize_`` made.

    Args:
        capture: of the float model.
        configs: to choose from, such as ``IntxWeightOnlyConfig`` with several group sizes and bits.  A linear whose
            width is no multiple of a group size does not get that config; any linear can stay in float.
        batches: data on which quality is measured; a list, or a loader that starts over.
        target: dB of the worst output, or a :class:`pt2qa.Target` with a function of a model; at the fewest bytes.
        max_bytes: of all parameters; without a target, the best quality that fits.
        filter_fn: which modules may be quantized, as in ``quantize_``.
        inputs_of: as in :func:`pt2qa.compare_layers`.
        mask: as there.
        progress: as there.

    Returns:
        The choice.  If the target cannot be met, it is the best one found, and ``met`` is False.

    Raises:
        SelectionError: neither target nor budget, an argument of another kind, or no linear takes any of the configs.
        PairingError: a config multiplies integers, see :func:`pt2qa.pair`.

    >>> from torchao.quantization import IntxWeightOnlyConfig, PerGroup
    >>> choices = [IntxWeightOnlyConfig(torch.int4, PerGroup(32)), IntxWeightOnlyConfig(torch.int8)]
    >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).eval()
    >>> x = torch.randn(16, 64)
    >>> found = mixed_config(pt2qa.capture(net, x), choices, [x], target=25, progress=False)
    >>> found.met
    True
    """
    if target is None and max_bytes is None:
        raise SelectionError("got neither target nor max_bytes. Pass target=30 (dB), or max_bytes=100_000_000.")
    listed = isinstance(configs, list | tuple) and all(isinstance(each, AOBaseConfig) for each in configs)
    for fits, name, got, wanted in (
        (isinstance(capture, pt2qa.Capture), "capture", capture, "what pt2qa.capture(model, ...) returned"),
        (listed, "configs", configs, "a list of configs of quantize_, such as [IntxWeightOnlyConfig(torch.int4)]"),
        (isinstance(target, pt2qa.Target | float | int | None), "target", target, "dB, such as 30, or a pt2qa.Target"),
    ):
        if not fits:
            raise SelectionError(f"{name}: got {str(got)[:80]!r}, expected {wanted}.")
    reading: dict[str, Any] = {"inputs_of": inputs_of, "mask": mask, "progress": progress}
    model = capture.eager
    assert model is not None, "what pt2qa.capture returns has its model"
    aim = target if isinstance(target, pt2qa.Target) or target is None else pt2qa.Target(float(target))
    metric = None if aim is None else aim.metric
    options = _options(capture, model, configs, batches, filter_fn, reading)
    choices = _choices(options)
    if max_bytes is not None:
        left = max_bytes - nbytes(model)
        kept = [choice for choice in choices if sum(option.nbytes for option in choice.values()) <= left]
        choices = kept or choices[:1]

    def made(number: int) -> tuple[str, nn.Module]:
        source = code.call_of({name: option.config for name, option in choices[number].items()})
        transformed = _copy(model)
        code.run(source, transformed)
        return source, transformed

    def paired(transformed: nn.Module) -> pt2qa.QuantizedPair:
        return pt2qa.pair(capture, transformed, quantizer="quantize_")

    def sqnr(pair: pt2qa.QuantizedPair) -> float:
        return pt2qa.compare_layers(pair, batches, isolated=False, **reading).sqnr

    @functools.cache
    def value(number: int) -> float:
        transformed = made(number)[1]
        return sqnr(paired(transformed)) if metric is None else metric(transformed)

    needed = -np.inf
    low, high = 0, len(choices) - 1
    if aim is not None:
        needed = aim.at_least * (metric(model) if metric is not None and aim.of_float else 1.0)
        if value(high) >= needed:
            noise = [sum(option.noise for option in choice.values()) for choice in choices]
            expected = -10 * np.log10(np.maximum(noise, np.finfo(float).tiny))
            middle = (low + high) // 2
            while low < high:
                measured = value(middle)
                low, high = (low, middle) if measured >= needed else (middle + 1, high)
                # Noise that adds up leaves dB that differ from the expected ones by about the same everywhere.
                close = np.searchsorted(expected, expected[middle] + needed - measured)
                middle = (low + high) // 2 if metric is not None else int(np.clip(close, low, max(low, high - 1)))
    source, transformed = made(high)
    pair = paired(transformed)
    own = sqnr(pair)
    final = own if metric is None else metric(pair.quantized)
    size = nbytes(transformed)
    return MixedConfig(
        code=source,
        configs={name: option.config for name, option in choices[high].items()},
        pair=pair,
        sqnr=own,
        value=final,
        nbytes=size,
        met=bool(final >= needed and (max_bytes is None or size <= max_bytes)),
        trials=max(value.cache_info().currsize, 1),
    )


def _options(
    capture: pt2qa.Capture,
    model: nn.Module,
    configs: Sequence[Any],
    batches: Iterable[Any],
    filter_fn: Callable[[nn.Module, str], bool],
    reading: Mapping[str, Any],
) -> dict[str, list[_Option]]:
    """What each linear may get; float costs nothing and has no noise."""
    names = {id(module): name for name, module in model.named_modules()}
    shared = [id(weight) for module in model.modules() for weight in module.parameters(recurse=False)]
    found: dict[str, list[_Option]] = {}
    for config in configs:
        width = next((each.group_size for each in vars(config).values() if isinstance(each, PerGroup)), 1)
        taken: set[str] = set()

        def takes(module: nn.Module, name: str, width: int = width, taken: set[str] = taken) -> bool:
            weight: Any = module.weight if filter_fn(module, name) else None
            if weight is None or weight.shape[-1] % width:
                return False
            taken.add(name)
            return True

        transformed = _copy(model)
        quantize_(transformed, config, takes)
        if not taken:
            continue
        pair = pt2qa.pair(capture, transformed, quantizer="quantize_")
        modules = {op.name: names[id(model.get_submodule(op.module))] for op in pair.names.values()}
        noise = dict.fromkeys(taken, 0.0)
        for row in pt2qa.sensitivity(pair, batches, **reading).rows:
            readers = [reader for reader in pair.sites[row.site].readers if modules.get(reader) in taken]
            for reader in readers:
                noise[modules[reader]] += row.noise / len(readers)
        for name in sorted(taken, key=list(names.values()).index):
            weight: Any = model.get_submodule(name).weight
            spared = weight.nbytes if shared.count(id(weight)) == 1 else 0  # a tied one stays for its other readers
            more = _nbytes(transformed.get_submodule(name).weight) - spared
            found.setdefault(name, [_Option(None, 0, 0.0)]).append(_Option(config, more, noise[name]))
    if not found:
        raise SelectionError("configs: no linear takes any of them; group sizes have to divide the width.")
    return found


def _choices(options: Mapping[str, Sequence[_Option]]) -> list[dict[str, _Option]]:
    """From the fewest bytes to the most, the choices with the least noise; each leaves something quantized."""
    least = {name: min(each.nbytes for each in own) for name, own in options.items()}
    span = sum(max(each.nbytes for each in own) - least[name] for name, own in options.items())
    unit = max(span / STEPS, 1.0)
    noise, taken = np.zeros(STEPS + 1 + len(options)), []
    for name, own in options.items():
        with_each = np.full((len(own), len(noise)), np.inf)
        for number, option in enumerate(own):
            steps = int(np.ceil((option.nbytes - least[name]) / unit))
            with_each[number, steps:] = noise[: len(noise) - steps] + option.noise
        taken.append(with_each.argmin(0))
        noise = with_each.min(0)

    def choice(left: int) -> Iterator[tuple[str, _Option]]:
        for (name, own), numbers in zip(reversed([*options.items()]), reversed(taken), strict=True):
            option = own[numbers[left]]
            left -= int(np.ceil((option.nbytes - least[name]) / unit))
            yield name, option

    better = np.flatnonzero(np.diff(noise, prepend=np.inf) < 0)
    found = [dict(reversed(list(choice(int(number))))) for number in better]
    return [each for each in found if any(option.config is not None for option in each.values())]


def _copy(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters, which ``quantize_`` replaces and never changes."""
    return copy.deepcopy(model, {id(each): each for each in model.parameters()})


def nbytes(model: nn.Module) -> int:
    """The bytes of a model's parameters, each counted once: integers at their own width."""
    return sum(_nbytes(each) for each in model.parameters())


def _nbytes(weight: Any) -> int:
    if not hasattr(weight, "__tensor_flatten__"):
        return int(weight.nbytes)
    parts: dict[str, Tensor] = {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}
    kept = {name: part for name, part in parts.items() if name != "zero_point" or bool(part.any())}
    bits = str(getattr(weight, "target_dtype", "")).removeprefix("torch.int")
    integers = kept.pop("qdata").numel() * int(bits) // 8 if bits else 0
    return integers + sum(part.nbytes for part in kept.values())
