"""Options of a plug-in: the fields of its dataclass, their types, checks and spelling."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pt2qa._printable import did_you_mean
from pt2qa.errors import PluginError
from pt2qa.plugins.protocol import Backend

_P = TypeVar("_P")
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a plug-in: ``values`` describes what it takes, ``default`` is its current value."""

    name: str
    values: str
    default: object
    help: str


def options_of(plugin: object) -> tuple[Option, ...]:
    """The options of a plug-in, in the order of its fields.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    Raises:
        PluginError: the annotations of its fields cannot be read.

    >>> [option.name for option in options_of(pt2qa.quantizer("x86"))]
    ['mode', 'reduce_range', 'modules', 'op_types']
    """
    hints = _hints(plugin)
    return tuple(
        Option(field.name, _values(hints[field.name]), getattr(plugin, field.name), field.metadata.get("help", ""))
        for field in _fields(plugin)
    )


def check_options(plugin: object) -> None:
    """Checks that each field of a plug-in has a value of its annotated type; for a plug-in's ``__post_init__``.

    ``bool``, ``int``, ``float``, ``str``, ``Literal``, ``Mapping`` and unions of these are checked; the plug-in must
    check other types itself.

    Args:
        plugin: a dataclass whose fields are its options.

    Raises:
        PluginError: names the plug-in, the option, what it got and what it takes.

    >>> pt2qa.quantizer("x86", reduce_range="yes")
    Traceback (most recent call last):
    pt2qa.errors.PluginError: quantizer 'x86': option reduce_range: got 'yes', expected true|false...
    """
    hints = _hints(plugin)
    for field in _fields(plugin):
        value, hint = getattr(plugin, field.name), hints[field.name]
        if not any(_fits(value, part) for part in _alternatives(hint)):
            raise PluginError(
                f"{_who(plugin)}: option {field.name}: got {value!r}, "
                f"expected {_values(hint)}{did_you_mean(value, _choices(hint))}"
            )


def with_options(plugin: _P, options: Mapping[str, object]) -> _P:
    """The same plug-in with some options replaced, which are checked."""
    for name in options:
        _check_known(plugin, name)
    changed: _P = dataclasses.replace(plugin, **options)  # type: ignore[type-var]  # plug-ins are dataclasses
    check_options(changed)
    return changed


def parse_options(plugin: object, text: str) -> dict[str, object]:
    """Parses ``"per_channel=false,mode=dynamic"`` according to the types of the plug-in's fields."""
    hints, options = _hints(plugin), dict[str, object]()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise PluginError(f"{_who(plugin)}: got {item!r}, expected option=value")
        _check_known(plugin, name)
        if name in options:
            raise PluginError(f"{_who(plugin)}: option {name} is given twice")
        options[name] = _parse(plugin, name, value, hints[name])
    return options


def describe(plugin: object) -> str:
    """The shortest description of a configured plug-in: its name, and the options that differ from their default.

    If the options can be written as text, :func:`pt2qa.plugins.resolve` creates the same plug-in from it.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> describe(pt2qa.quantizer("x86", reduce_range=True))
    'x86:reduce_range=true'
    """
    changed = []
    for field in _fields(plugin):
        value = getattr(plugin, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING and value != default:
            changed.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
    return name_of(plugin) + (":" + ",".join(changed) if changed else "")


def name_of(plugin: object) -> str:
    """The plug-in's name; its class's for an object that has none."""
    return str(getattr(plugin, "name", type(plugin).__name__))


def _who(plugin: object) -> str:
    return f"{'backend' if isinstance(plugin, Backend) else 'quantizer'} {name_of(plugin)!r}"


def _fields(plugin: object) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(plugin) if field.init)  # type: ignore[arg-type]  # ditto


def _check_known(plugin: object, name: str) -> None:
    known = [field.name for field in _fields(plugin)]
    if name not in known:
        listed = ", ".join(f"{option.name} ({option.values})" for option in options_of(plugin))
        raise PluginError(
            f"{_who(plugin)} has no option {name!r}{did_you_mean(name, known)} "
            + (f"Its options: {listed}" if listed else "It has no options")
        )


def _hints(plugin: object) -> dict[str, Any]:
    try:
        return get_type_hints(type(plugin))
    except (NameError, TypeError, SyntaxError) as error:
        raise PluginError(
            f"{_who(plugin)}: the types of its options cannot be read: {error}. "
            "Import the types that the fields of a plug-in are annotated with at run time"
        ) from error


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> list[str]:
    return [str(value) for part in _alternatives(hint) if get_origin(part) is Literal for value in get_args(part)]


def _values(hint: Any) -> str:
    words = []
    for part in _alternatives(hint):
        if get_origin(part) is Literal:
            words += [str(value) for value in get_args(part)]
        elif part is bool:
            words += ["true", "false"]
        elif part is type(None):
            words.append("none")
        else:
            words.append("mapping" if _is_mapping(part) else getattr(part, "__name__", str(part)))
    return "|".join(words)


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if hint in (bool, str, type(None)):
        return isinstance(value, hint)
    if _is_mapping(hint):
        return isinstance(value, Mapping)
    return True


def _parse(plugin: object, name: str, text: str, hint: Any) -> object:
    who = f"{_who(plugin)}: option {name}"
    simple = (bool, int, float, str, type(None))
    written = [part for part in _alternatives(hint) if part in simple or get_origin(part) is Literal]
    if not written:
        raise PluginError(
            f"{who} takes a {_values(hint)}, which cannot be given as text; "
            f"write pt2qa.quantizer({name_of(plugin)!r}, {name}=...) in Python"
        )
    for value in _readings(text):
        if any(_fits(value, part) for part in written):
            return value
    raise PluginError(f"{who}: got {text!r}, expected {_values(hint)}{did_you_mean(text, _choices(hint))}")


def _readings(text: str) -> Iterator[object]:
    """What a text may stand for, itself last."""
    lower = text.lower()
    if lower in (*_TRUE, *_FALSE):
        yield lower in _TRUE
    if lower == "none":
        yield None
    for number in (int, float):
        with contextlib.suppress(ValueError):
            yield number(text)
    yield text
