"""``torchrun -m pt2qa``: several processes, each with its part of a flow's data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import pt2qa
from pt2qa.cli.flow import Flow, load_flow, part_of


@contextmanager
def own_part(where: str) -> Iterator[tuple[Flow, bool]]:
    """A flow with this process's part of its data, and whether this is the process that prints and writes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield load_flow(where), True
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
            yield part_of(load_flow(where), ranks.rank, ranks.size), ranks.rank == 0
    finally:
        dist.destroy_process_group()
