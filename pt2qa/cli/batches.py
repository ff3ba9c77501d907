"""The data of a flow: a loader's items as inputs of the model, parts of them, and sizes that vary."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Inputs:
    """The model's inputs in a loader's items; can be read again and again.

    >>> list(Inputs([("image", 3), ("picture", 5)], lambda item: item[0]))
    ['image', 'picture']
    """

    loader: Any
    inputs_of: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        # A dataset of torch has items by number, and may have no end by them.
        listed = isinstance(self.loader, Iterable)
        items = self.loader if listed else (self.loader[index] for index in range(len(self.loader)))
        return map(self.inputs_of, items)

    def __len__(self) -> int:
        return len(self.loader)  # TypeError if the loader has no length, as with len()


@dataclass(frozen=True)
class Part:
    """A part of batches that can be read again and again: as many as the other parts have, or one fewer.

    >>> [list(Part("abcde", part, 2)) for part in range(2)]
    [['a', 'b'], ['c', 'd', 'e']]
    """

    loader: Iterable[Any]
    part: int
    parts: int

    def __iter__(self) -> Iterator[Any]:
        try:
            count = len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            count = sum(1 for _ in self.loader)
        first, end = (count * part // self.parts for part in (self.part, self.part + 1))
        return itertools.islice(iter(self.loader), first, end)


@dataclass(frozen=True)
class Fit:
    """Gives an item the form of the example inputs: without labels, in tensors, and one sample as a batch of 1.

    Numbers, lists, NumPy arrays and float64 become tensors of the example's dtype, but integers never become floats:
    whether pictures of 0 to 255 must be scaled is for the flow to say.

    >>> import numpy
    >>> fit = Fit((torch.zeros(4, 3),), {})
    >>> fit((numpy.ones(3), 7))
    (tensor([[1., 1., 1.]]),)
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, item: Any) -> Any:
        """The model's inputs in an item, which stays as it is where it cannot be told."""
        given = _named(item) if self.kwargs else _listed(item)
        if isinstance(given, Mapping):
            named = {name: _tensor(given[name], example) for name, example in self.kwargs.items() if name in given}
            same = given is item and len(named) == len(item) and all(named[name] is item[name] for name in named)
            return item if same else named
        if self.kwargs or len(given) < len(self.args):
            return item
        inputs = tuple(_tensor(value, example) for value, example in zip(given, self.args, strict=False))
        if not isinstance(item, tuple | list):
            return inputs[0]
        same = isinstance(item, tuple) and len(item) == len(inputs) and all(map(operator.is_, item, inputs))
        return item if same else inputs

    def said_of(self, item: Any) -> list[str]:
        """What it does to items such as this one that the user should know."""
        given = _named(item) if self.kwargs else _listed(item)
        if isinstance(given, Mapping):
            left = ", ".join(str(name) for name in given if name not in self.kwargs)
            pairs = [(given[name], example) for name, example in self.kwargs.items() if name in given]
        else:
            more = len(given) - len(self.args)
            left = "" if more <= 0 else "the last value" if more == 1 else f"the last {more} values"
            pairs = list(zip(given, self.args, strict=False))
        single = any(_dim(value) == _dim(example) - 1 >= 0 for value, example in pairs)
        return [f"items hold more than the example inputs; left out: {left}"] * bool(left) + [
            "an item is one sample, and runs as a batch of 1; a DataLoader with batch_size= is faster"
        ] * single


def _named(item: Any) -> Any:
    """The dict of an item that is one, or that begins with one, as in (inputs, label)."""
    first = item[0] if isinstance(item, tuple | list) and item else item
    return first if isinstance(first, Mapping) else _listed(item)


def _listed(item: Any) -> Any:
    return item if isinstance(item, tuple | list) else (item,)


def _tensor(value: Any, example: Any) -> Any:
    import numpy as np
    import torch

    if not isinstance(example, torch.Tensor):
        return value
    made = not isinstance(value, torch.Tensor)
    if made:
        try:
            value = torch.tensor(np.asarray(value))
        except (TypeError, ValueError):
            return value  # the capture names what it is
    if made or value.dtype == torch.float64:  # what a DataLoader makes of NumPy arrays
        alike = value.is_floating_point() == example.is_floating_point()
        if alike and (value.is_floating_point() or torch.promote_types(value.dtype, example.dtype) == example.dtype):
            value = value.to(example.dtype)
    return value.unsqueeze(0) if value.dim() == example.dim() - 1 else value


def _dim(value: Any) -> int:
    import numpy as np

    return value.dim() if hasattr(value, "dim") else np.ndim(value)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs, which are one, a tuple of positional ones or a dict, as positional and keyword inputs."""
    if isinstance(inputs, dict):
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


@dataclass(frozen=True)
class Sizes:
    """The dimensions in which batches differ in size.

    ``axes`` has all sizes, by leaf of the inputs and dimension.  ``example`` are inputs to capture with:
    ``torch.export`` makes a size of 1 a constant, so they have another one in these dimensions, if a batch has.
    ``other`` are inputs of another size.
    """

    axes: dict[tuple[str, int], set[int]]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    other: tuple[tuple[Any, ...], dict[str, Any]]

    def dynamic_shapes(self) -> Any:
        """For ``torch.export``: these dimensions are dynamic, up to their largest size."""
        import torch

        from pt2qa._capture.inputs import leaf_names
        from pt2qa._graph.internals.torch import pytree

        specs: dict[str, Any] = {leaf: None for leaf, _ in leaf_names(*self.example)}
        for (leaf, axis), sizes in self.axes.items():
            specs[leaf] = (specs[leaf] or {}) | {axis: torch.export.Dim.AUTO(max=max(sizes))}
        args, kwargs = pytree.tree_unflatten(list(specs.values()), pytree.tree_structure(self.example))
        return kwargs or args

    def __str__(self) -> str:
        from pt2qa._report.prose import few

        sizes = {place: few([*map(str, sorted(found))]) for place, found in self.axes.items()}
        return few([f"{leaf} has {found} in dimension {axis}" for (leaf, axis), found in sizes.items()])


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], loaders: Iterable[Iterable[Any]]) -> Sizes | None:
    """Where the batches of loaders, or the example inputs, differ in size; None if nowhere.

    It reads all batches once, and leaves torch's random numbers as they were.
    """
    import torch

    from pt2qa._capture.inputs import leaf_names

    def shapes(call: Any) -> list[tuple[str, tuple[int, ...]]]:
        return [(leaf, tuple(getattr(value, "shape", ()))) for leaf, value in leaf_names(*call)]

    def forms(call: Any) -> list[tuple[Any, ...]]:
        return [(leaf, getattr(value, "dtype", None), getattr(value, "ndim", 0)) for leaf, value in leaf_names(*call)]

    first = shapes((args, kwargs))
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], Any] = {tuple(first): (args, kwargs)}
    with torch.random.fork_rng(devices=[]):
        for batch in itertools.chain.from_iterable(loaders):
            call = as_call(batch)
            if forms(call) == forms((args, kwargs)):
                found.setdefault(tuple(shapes(call)), call)
    axes: dict[tuple[str, int], set[int]] = {}
    for position, (leaf, shape) in enumerate(first):
        for axis in range(len(shape)):
            if len(sizes := {each[position][1][axis] for each in found}) > 1:
                axes[leaf, axis] = sizes
    if not axes:
        return None
    fit = [call for each, call in found.items() if all(dict(each)[leaf][axis] > 1 for leaf, axis in axes)]
    example = fit[0] if fit else (args, kwargs)
    return Sizes(axes, example, next(call for call in found.values() if call is not example))
