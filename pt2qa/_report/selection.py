"""Which ops somebody means by module paths and kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from pt2qa._printable import near_names
from pt2qa.errors import SelectionError

OpKind = str | type | Callable[..., Any]
"""A kind of op: ``"conv2d"``; the class of the module that calls it, ``nn.Conv2d``; a function, ``torch.add``; an
overload, ``torch.ops.aten.add.Tensor``."""


class Labelled(Protocol):
    """Anything with a name, a module path and an op type; what knows the module's class has ``module_type``, too."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def op(self) -> str: ...


def select(labels: Sequence[Labelled], prefixes: Sequence[str], ops: Collection[OpKind]) -> frozenset[int]:
    """Positions of the ops under any of the module paths and of any of the kinds; all if both are empty.

    Rejects unmatched selectors, with close matches.
    """
    for prefix in prefixes:
        if not any(_is_under(label, prefix) for label in labels):
            raise no_match("module or op", prefix, [name for label in labels for name in (label.module, label.name)])
    for kind in ops:
        if not any(_is_of(label, kind) for label in labels):
            raise no_match("op type", _name_of(kind), [label.op for label in labels])
    return frozenset(
        position
        for position, label in enumerate(labels)
        if (not prefixes or any(_is_under(label, prefix) for prefix in prefixes))
        and (not ops or any(_is_of(label, kind) for kind in ops))
    )


def no_match(what: str, given: str, known: Iterable[str]) -> SelectionError:
    """The error for a selector that matches nothing, with near names."""
    names = sorted({name for name in known if name})
    return SelectionError(f"no {what} is called {given!r}. Closest names: {near_names(given, names, 5)}.")


def _is_under(label: Labelled, prefix: str) -> bool:
    return any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}/")) for name in (label.module, label.name))


def _is_of(label: Labelled, kind: OpKind) -> bool:
    if isinstance(kind, type):
        return getattr(label, "module_type", "") == kind.__name__
    return label.op == _name_of(kind)


def _name_of(kind: OpKind) -> str:
    """A kind in the words of a report: no overload, no underscore of an op in place."""
    if isinstance(kind, (str, type)):
        return kind if isinstance(kind, str) else kind.__name__
    return str(getattr(getattr(kind, "overloadpacket", kind), "__name__", kind)).removesuffix("_")
