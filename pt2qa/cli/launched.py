"""``torchrun -m pt2qa``: several processes, each with its part of a flow's data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from pt2qa.cli.flow import Flow, load_flow, part_of

if TYPE_CHECKING:
    from pt2qa._ranks import Ranks


@contextmanager
def own_part(where: str) -> Iterator[tuple[Flow, bool]]:
    """A flow with this process's part of its data, and whether this is the process that writes."""
    with _launched() as ranks:
        given = load_flow(where)
        yield (given, True) if ranks is None else (part_of(given, ranks.rank, ranks.size), ranks.rank == 0)


@contextmanager
def _launched() -> Iterator[Ranks | None]:
    """The processes that torchrun started, of which only the first one prints; None if it did not."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield None
        return
    import torch
    import torch.distributed as dist

    # It imports torch._dynamo, which keeps a reference to a group that is there before; the threads of the group would
    # then live until the process ends, and now and then abort it.
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401

    import pt2qa

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
            yield ranks
    finally:
        dist.destroy_process_group()
