"""Damaged report files: each gives the report that was written, or a ReportError, and so does whatever reads it.

A damage is plain (flipped bits, cut off, bytes spliced in or swapped) or sealed: a field is given a hostile value and
the checksum is made anew, as somebody would who means it.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from pt2qa import merge
from pt2qa._report.base import write_text
from pt2qa._report.charts import drawings, of_rows
from pt2qa._report.html import html_page
from pt2qa._report.plot import notebook_html, png
from pt2qa._report.storage import CHECKSUM, checksum
from pt2qa._report.tensorboard import _packed
from pt2qa.cli import reading  # noqa: F401 - adds its commands
from pt2qa.cli.group import main
from pt2qa.errors import ReportError, SelectionError
from pt2qa.report import BadCases, Findings, LayerReport, Profile, Reconfiguration, Report, diff, gate, load
from tests.soak.figures import Outcome
from tests.soak.samples import sample, samples

MEMORY = 4 << 30
"""Bytes that reading one file may take beyond what the process has."""

MEASURED = Path(__file__).parents[1] / "report" / "v0_2_0"
"""One report of each kind that an analysis of 0.2.0 made."""

SECONDS = 20
"""How long one damaged file may take."""

USES = 6
"""Of all that can be done with a report, how much is tried on each."""

LETTERS = [
    "\ud800",
    "\udfff",
    "\x1b[31m",
    "\x00",
    "\n",
    "\r",
    "\t",
    "\u202e",
    "=1+1",
    "-@",
    "</script>",
    "a" * 5000,
    "",
]
WHOLE = [0, -1, 1, 255, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 10**30, 10**400]
REAL = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.0, -0.0, 1e19, 0.5]
SHAPES = [(), (0,), (1,), (3, 0), (0, 3), (7,), (2, 2, 2)]
DTYPES = ["float64", "float32", "int64", "int32", "int8", "uint8", "uint64", "bool", "float16"]
TYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "U64", "BOOL", "I8", "F4", "C64", "x"]

Contents = tuple[dict[str, Any], dict[str, str]]


def fuzz(count: int, seed: int, *, seconds: float | None = None) -> Outcome:
    """Read so many damaged files, as far as the time goes."""
    figures = Outcome("damaged files")
    chance = random.Random(seed)
    reports = samples()
    with tempfile.TemporaryDirectory() as folder, bounded():
        path = Path(folder) / "report.safetensors"
        whole: dict[str, bytes] = {}
        for name, report in reports.items():
            report.save(path)
            whole[name] = path.read_bytes()
            use(report, report, chance, every=True)
        end = None if seconds is None else time.monotonic() + seconds
        for _ in range(count):
            if end is not None and time.monotonic() > end:
                break
            kind = chance.choice(list(reports))
            how = chance.choice(list(SEALED if chance.random() < 0.6 else DAMAGES))
            data = DAMAGES[how](whole[kind], chance, whole)
            path.write_bytes(data)
            try:
                with _alarm():
                    outcome = _read(path, reports[kind], chance, sealed=how in SEALED)
            except Exception as error:
                figures.violations.append(f"{kind}, {how}: {type(error).__name__}: {error!s:.100} ({where(error)})")
                outcome = "VIOLATION"
            figures.counts["damages"] += 1
            figures.counts[outcome] += 1
    return figures


def where(error: BaseException) -> str:
    """The last lines of code that an error came from."""
    last = traceback.extract_tb(error.__traceback__)[-3:]
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last)


def _read(path: Path, original: Report, chance: random.Random, *, sealed: bool) -> str:
    try:
        report = load(path)
    except ReportError as error:
        _check_printable(str(error))
        return "refused"
    if not sealed and repr(asdict(report)) != repr(asdict(original)):  # type: ignore[call-overload]
        raise AssertionError("other content was read, and nothing was said")
    use(report, original, chance)
    return "read"


def use(report: Report, original: Report, chance: random.Random, *, every: bool = False) -> None:
    """Do some of what can be done with a report, or everything: it works, or gives a ReportError in plain letters."""
    acts = list(uses(report, original))
    for act in acts if every else chance.sample(acts, min(len(acts), USES)):
        try:
            text = act()
        except (ReportError, SelectionError) as error:
            text = str(error)
        if isinstance(text, str):
            _check_printable(text)


def _check_printable(text: str) -> None:
    text.encode("utf-8")
    if bad := [letter for letter in text if not letter.isprintable() and letter != "\n"]:
        raise AssertionError(f"a text holds {bad[0]!r}")


def uses(report: Report, original: Report) -> Iterator[Callable[[], Any]]:
    yield lambda: str(report)
    yield lambda: repr(report)
    for sort in ("worst", "graph", "name", "value", "sqnr"):
        yield lambda sort=sort: report.text(sort=sort, limit=None, width=80)
    for extended in (False, True):
        yield lambda extended=extended: report.csv(extended=extended)
        yield lambda extended=extended: (report.to_pandas(extended=extended), None)[1]
    yield lambda: html_page(report)
    yield lambda: notebook_html(report)
    yield lambda: ([png(each) for each in drawings(report)], None)[1]
    yield lambda: ([png(each) for _, each in of_rows(report)[:2]], None)[1]
    yield lambda: (
        [_packed(each) for run in report.events(0, True, [report]).values() for each in run],
        None,
    )[1]
    yield lambda: (merge([report, report]), None)[1]
    yield lambda: _saved(report)
    if isinstance(report, Profile):
        yield lambda: html_page([sample(LayerReport), report])
    for a, b in ((original, report), (report, original), (report, report)):
        yield lambda a=a, b=b: str(diff(a, b))
        yield lambda a=a, b=b: diff(a, b).csv(extended=True)
        yield lambda a=a, b=b: _gated(gate(b, baseline=a, max_drop=1.0))
    for wanted in ("sqnr>=1", "rows.value>=0", "*:sqnr>=2", "error_count==0", "met==1"):
        yield lambda wanted=wanted: _gated(gate(report, require=wanted))
    yield report.summary
    yield lambda: report.table(limit=None, width=60)
    if isinstance(report, BadCases):
        yield lambda: (report.batches(), None)[1]
    if isinstance(report, Profile):
        for row in report.rows:
            yield lambda row=row: (report.histogram(row), report.histogram(row, 16), None)[2]
            yield lambda row=row: (report.quantile(row, 0.5), report.channel(row), None)[2]
    if isinstance(report, Reconfiguration):
        yield lambda: (report.plan, None)[1]
    if isinstance(report, LayerReport):
        yield lambda: str(report.opened(report.rows[0].part_of)) if report.rows else ""
    if isinstance(report, Findings):
        yield lambda: str(report.joined(report))


def _saved(report: Report) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report.save(f"{folder}/again.safetensors")
        write_text(f"{folder}/report.txt", [load(f"{folder}/again.safetensors")])
        done = CliRunner().invoke(main, ["show", f"{folder}/again.safetensors", "--csv", f"{folder}/rows.csv"])
        if done.exit_code != 0:
            raise AssertionError(f"pt2qa show ends with {done.exit_code}: {done.output}")
        return Path(f"{folder}/report.txt").read_text(encoding="utf-8")


def _gated(result: Any) -> str:
    return "\n".join([str(result), result.junit(), result.github()])


# -- damages -----------------------------------------------------------------------------------------------------


def _flip(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        place = chance.randrange(8 * _reach(data, chance))
        damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def _cut(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
    return data[: chance.randrange(len(data))]


def _splice(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
    other = chance.choice(list(whole.values()))
    start, length = chance.randrange(len(other)), chance.choice([1, 2, 8, 100, 4096])
    at = chance.randrange(_reach(data, chance))
    return data[:at] + other[start : start + length] + data[at + chance.choice([0, length]) :]


def _swap(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
    length = chance.choice([1, 4, 8, 64])
    a, b = sorted(chance.randrange(_reach(data, chance)) for _ in range(2))
    b = max(b, a + length)
    return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]


def _noise(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
    at, length = chance.randrange(len(data)), chance.choice([1, 8, 512])
    return data[:at] + chance.randbytes(length) + data[at + length :]


def _reach(data: bytes, chance: random.Random) -> int:
    """The header is the smaller part, and the more delicate one."""
    return chance.choice([len(data), 8 + int.from_bytes(data[:8], "little")])


def _offsets(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
    """A tensor's type, shape or place in the file, as the safetensors header says it."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    entry = header[chance.choice([name for name in header if name != "__metadata__"] or ["__metadata__"])]
    match chance.randrange(3):
        case 0:
            entry["dtype"] = chance.choice(TYPES)
        case 1:
            entry["shape"] = [
                chance.choice([0, 1, 2, 5, 2**31, 2**62, 2**64, -1, 1.5]) for _ in range(chance.randrange(4))
            ]
        case _:
            entry["data_offsets"] = [chance.choice([0, 8, 40, size, 2**40, 2**63, -8]) for _ in range(2)]
    text = json.dumps(header).encode()
    return (len(text) + chance.choice([0, 0, 0, 1, -1])).to_bytes(8, "little") + text + data[8 + size :]


def _sealed(change: Callable[[Contents, random.Random], None]) -> Callable[..., bytes]:
    def damage(data: bytes, chance: random.Random, whole: dict[str, bytes]) -> bytes:
        tensors = {name: np.array(array) for name, array in from_bytes(data).items()}
        size = int.from_bytes(data[:8], "little")
        text = dict(json.loads(data[8 : 8 + size])["__metadata__"])
        for _ in range(chance.choice([1, 1, 1, 2, 5])):
            change((tensors, text), chance)
        return to_bytes(tensors, {**text, CHECKSUM: checksum(tensors, text)})

    return damage


def _change_text(contents: Contents, chance: random.Random) -> None:
    """One value somewhere in the JSON of a field."""
    _, text = contents
    name = chance.choice([name for name in text if not name.startswith("pt2qa.")])
    text[name] = json.dumps(_changed(json.loads(text[name]), chance))


def _changed(value: Any, chance: random.Random, depth: int = 0) -> Any:
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [_changed(item, chance, depth + 1) if i == place else item for i, item in enumerate(value)]
    if isinstance(value, dict) and value and chance.random() < 0.8:
        place = chance.choice(list(value))
        return {key: _changed(item, chance, depth + 1) if key == place else item for key, item in value.items()}
    match chance.randrange(15):
        case n if n < 10:
            return _alike(value, chance)
        case 10:
            return chance.choice(LETTERS)
        case 11:
            return chance.choice(WHOLE)
        case 12:
            return chance.choice(REAL)
        case 13:
            return chance.choice([None, True, [], {}, [[]], {"": None}, [None]])
        case _:
            deep: Any = value
            for _ in range(chance.choice([2, 60, 300])):
                deep = [deep] if chance.random() < 0.5 else {"tuple": [deep]}
            return deep


def _alike(value: Any, chance: random.Random) -> Any:
    """Another value of the same type: what passes the loader."""
    if isinstance(value, str):
        try:
            nested = json.loads(value)
        except ValueError:
            nested = None
        if isinstance(nested, dict | list) and nested:
            return json.dumps(_changed(nested, chance))
        return chance.choice([value + chance.choice(LETTERS), chance.choice(LETTERS) + value, chance.choice(LETTERS)])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(WHOLE)
    if isinstance(value, float):
        return chance.choice(REAL)
    if isinstance(value, list):
        return chance.choice([[], value[:-1], value + value[:1], value * 3])
    return value


def _change_tensor(contents: Contents, chance: random.Random) -> None:
    tensors, _ = contents
    if not tensors:
        return
    name = chance.choice(list(tensors))
    array = tensors[name]
    match chance.randrange(10):
        case n if n < 7 and array.size:
            flat = array.reshape(-1).copy()
            places = chance.choice([[chance.randrange(flat.size)], list(range(flat.size))])
            flat[places] = _number(array.dtype, chance)
            tensors[name] = flat.reshape(array.shape)
        case 7:
            shape = chance.choice(SHAPES)
            tensors[name] = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
        case 8:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tensors[name] = array.astype(chance.choice(DTYPES))
        case _:
            tensors[name] = chance.choice([array[:-1], np.concatenate([array, array])]) if array.ndim else array


def _number(dtype: np.dtype[Any], chance: random.Random) -> Any:
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return np.array(chance.choice(REAL)).astype(dtype)
    if dtype.kind == "b":
        return chance.random() < 0.5
    limits = np.iinfo(dtype)
    return chance.choice([0, 1, 2, 7, limits.min, limits.max, *([-1, -2] if limits.min else [])])


def _rename(contents: Contents, chance: random.Random) -> None:
    part = chance.choice([each for each in contents if each])
    name = chance.choice(list(part))
    value = part.pop(name)
    if chance.random() < 0.7:
        part[
            chance.choice([name + "x", name.partition("/")[0], chance.choice(list(part) or ["x"]), "rows/custom/x"])
        ] = value


def _same_rows(contents: Contents, chance: random.Random) -> None:
    """A table with another number of rows in all of its columns: what passes the loader."""
    tensors, text = contents
    tables = sorted({name.partition("/")[0] for name in tensors if "/" in name})
    if not tables:
        return
    table, rows = chance.choice(tables), chance.choice([0, 1, 2, 40])
    for name in [name for name in tensors if name.startswith(f"{table}/")]:
        tensors[name] = (
            np.resize(tensors[name], (rows, *tensors[name].shape[1:])) if tensors[name].ndim else tensors[name]
        )
    for name in [name for name in text if name.startswith(f"{table}/") and not name.endswith("/custom")]:
        value = json.loads(text[name])
        text[name] = json.dumps((value * (rows + 1))[:rows] if isinstance(value, list) else value)


SEALED: dict[str, Callable[..., bytes]] = {
    "sealed text": _sealed(_change_text),
    "sealed tensor": _sealed(_change_tensor),
    "sealed name": _sealed(_rename),
    "sealed rows": _sealed(_same_rows),
}
DAMAGES: dict[str, Callable[..., bytes]] = {
    "bits": _flip,
    "cut": _cut,
    "splice": _splice,
    "swap": _swap,
    "noise": _noise,
    "offsets": _offsets,
    **SEALED,
}


@contextmanager
def bounded() -> Iterator[None]:
    """Warnings are errors, and memory has an end."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    import torch  # noqa: F401 - its address space is not what is measured

    resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 30) + MEMORY, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
