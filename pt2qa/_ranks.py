"""Several processes, each with its part of the data, that compute one result."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from pt2qa._report.base import Report
from pt2qa._report.merging import merge
from pt2qa._report.notes import Note
from pt2qa.errors import BatchError, Pt2qaError, RankError

P = ParamSpec("P")
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class NoBatchError(BatchError):
    """There is no batch at all, which is no error of a rank whose part of the data is empty."""


class NoNumberError(NoBatchError):
    """No batch of those that were read counts.  If other ranks have batches that do, it is a note of their report."""


class Ranks:
    """The processes of a group, as one of them sees them.

    Every rank calls the same functions in the same order, and each of these ends with an exchange of what the ranks
    found, or of the error that one of them met.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._told: Exception | None = None

    def gather(self, value: T) -> list[T]:
        found = self._exchange(("", _packed(value)))
        if failed := _failed(found):
            raise failed
        return [pickle.loads(value) for _, value in found]

    def first(self, value: T | None) -> T | None:
        import torch.distributed as dist

        has = self.gather(value is not None)
        if not any(has):
            return None
        sent = [_packed(value)]
        source = has.index(True)
        dist.broadcast_object_list(sent, dist.get_global_rank(self.group, source) if self.group else source, self.group)
        found: T = pickle.loads(sent[0])
        return found

    def tell(self, error: Exception) -> Exception:
        """Tells the other ranks of an error; what to raise: the same if all ranks met one, else a RankError."""
        if error is self._told or isinstance(error, RankError):
            return error
        self._told = error
        found = self._exchange((f"{type(error).__name__}: {error}", None))
        return error if all(text for text, _ in found) else _failed(found) or error

    def _exchange(self, own: tuple[str, Any]) -> list[tuple[str, Any]]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, own, group=self.group)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} cannot reach all others; one of them ended: {error}") from error
        return found


class _Packing(pickle.Pickler):
    """Tensors travel as those of the CPU, to the rank's current device of a kind: it may not have the sender's."""

    def reducer_override(self, value: Any) -> Any:
        elsewhere = isinstance(value, Tensor) and value.device.type != "cpu"
        return (Tensor.to, (value.detach().cpu(), value.device.type)) if elsewhere else NotImplemented


def _packed(value: object) -> bytes:
    into = io.BytesIO()
    _Packing(into).dump(value)
    return into.getvalue()


_active: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def distributed(group: Any = None) -> Iterator[Ranks]:
    """Within it, every rank runs pt2qa on its part of the data, and all get the result for the whole.

    Each rank calls the same functions in the same order, each with its own batches, which may be none; the batches of
    rank 0 count as the first ones.  ``quantize`` calibrates on all of them, and every rank has the same pair; analyses
    return the report of all data on every rank; ``diagnose`` and ``reconfigure`` decide alike.  If a rank fails, all of
    them raise, with its message.

    Args:
        group: a ``torch.distributed`` process group, of any backend; None for the default one; it must be initialised.

    Yields:
        the ranks: ``rank`` and ``size``.

    Raises:
        RankError: no process group is initialised, or a rank failed.

    >>> import torch.distributed as dist
    >>> capture = pt2qa.capture(torch.nn.Linear(4, 2).eval(), torch.zeros(8, 4))
    >>> batches = [torch.randn(8, 4) for _ in range(4)]
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun gives rank and size
    >>> with pt2qa.distributed() as ranks:
    ...     mine = batches[ranks.rank :: ranks.size]
    ...     pair = pt2qa.quantize(capture, "xnnpack", mine, progress=False)
    ...     report = pt2qa.compare_layers(pair, mine, progress=False)
    >>> dist.destroy_process_group()
    >>> report.batches
    4
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RankError(
            "no process group is initialised. Start the program with torchrun, and call "
            'torch.distributed.init_process_group("gloo") first.'
        )
    ranks = Ranks(group)
    token = _active.set(ranks)
    try:
        with _told_to_all():
            yield ranks
    finally:
        _active.reset(token)


@contextmanager
def _told_to_all() -> Iterator[None]:
    """An error within it is an error of all ranks that compute together."""
    try:
        yield
    except Exception as error:
        ranks = _active.get()
        told = error if ranks is None else ranks.tell(error)
        if told is error:
            raise
        raise told from error


def active() -> Ranks | None:
    """The ranks that compute together; None outside of :func:`distributed`."""
    return _active.get()


def everywhere(value: T) -> list[T]:
    """What each rank gives, in their order; just the value where one process works alone."""
    ranks = _active.get()
    return [value] if ranks is None else ranks.gather(value)


def first_anywhere(value: T | None) -> T | None:
    ranks = _active.get()
    return value if ranks is None else ranks.first(value)


def same_everywhere(value: float, what: str) -> float:
    """A user's number, which must be the same on all ranks."""
    found = everywhere(value)
    if len({repr(each) for each in found}) > 1:
        raise RankError(
            f"{what}: the ranks have {', '.join(map(str, found))}. Reduce it over the ranks in the function."
        )
    return found[0]


def batches_before(count: Callable[[], int]) -> int:
    """How many batches the ranks before this one have; ``count`` counts those of this one."""
    ranks = _active.get()
    return 0 if ranks is None else sum(ranks.gather(count())[: ranks.rank])


def in_step(function: Function) -> Function:
    """A function that ranks call together: an error of one is an error of all."""
    return _told_to_all()(function)


AnyReport = TypeVar("AnyReport", bound=Report)


def over_ranks(analysis: Callable[P, AnyReport]) -> Callable[P, AnyReport]:
    """An analysis whose reports of parts of the data merge: within :func:`distributed`, each rank gets that of all."""

    @in_step
    @functools.wraps(analysis)
    def whole(*args: P.args, **kwargs: P.kwargs) -> AnyReport:
        metrics: Any = kwargs.get("metrics")
        given = {"metrics": metrics} if isinstance(metrics, dict) else {}
        return of_all_ranks(lambda: analysis(*args, **kwargs), lambda found: merge(found, **given))

    return whole


def of_all_ranks(part: Callable[[], T], together: Callable[[list[T]], T]) -> T:
    """What ``part`` finds in the data of each rank, put together; its ``notes`` say which ranks have no number."""
    ranks = _active.get()
    if ranks is None:
        return part()
    own: T | None = None
    missing: NoBatchError | KeyboardInterrupt | None = None
    try:
        own = part()
    except (NoBatchError, KeyboardInterrupt) as error:
        missing = error
    said = ""
    if isinstance(missing, KeyboardInterrupt):
        said = Note(f"rank {ranks.rank}: interrupted: had finished nothing", "interrupted")
    elif isinstance(missing, NoNumberError):
        said = f"rank {ranks.rank}: {missing}"
    gathered = ranks.gather((own, said))
    found = [each for each, _ in gathered if each is not None]
    if not found:
        assert missing is not None, "no rank has anything"
        raise missing
    merged: Any = together(found)
    without = [text for _, text in gathered if text]
    whole: T = replace(merged, notes=(*merged.notes, *without)) if without else merged
    return whole


def alone(what: str) -> None:
    """Refuses what does not add up over ranks, within :func:`distributed`."""
    if _active.get() is not None:
        raise RankError(f"{what} cannot be merged over ranks. Call it outside of pt2qa.distributed(), on one rank.")


def _failed(found: list[tuple[str, Any]]) -> Pt2qaError | None:
    texts = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text]
    return RankError("; ".join(texts)) if texts else None
