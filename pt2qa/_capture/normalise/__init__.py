"""Passes that change how a program is written, never what it computes, so that quantizers neither fail nor skip ops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.export import ExportedProgram

from pt2qa._capture.changes import Change, complete_users
from pt2qa._capture.normalise.passes import (
    ATTENTION,
    RECURRENT,
    decompose_attention,
    decompose_recurrent,
    inline_regions,
    keep_scalars,
    remove_added_zeros,
    remove_dead_code,
    write_out_padding,
    write_sources,
)
from pt2qa._capture.normalise.writes import make_writes_functional

PASSES = (make_writes_functional, remove_added_zeros, remove_dead_code, keep_scalars, write_out_padding)
"""In this order, after everything is inlined; dead code goes first, because it is not worth rewriting."""

DECOMPOSABLE = (*RECURRENT, ATTENTION)
"""The kinds of ops that can be decomposed."""


def normalise(program: ExportedProgram, decompose: Sequence[str] = ()) -> tuple[Change, ...]:
    """Runs every pass on a program, in place; ``decompose`` has kinds of ops of :data:`DECOMPOSABLE`."""
    complete_users(program)
    changes = [*inline_regions(program), *decompose_recurrent(program, decompose)]
    if ATTENTION in decompose:
        changes += decompose_attention(program)
    for run in PASSES:
        changes += run(program)
    # Last, because the sources describe the ops that remain.
    changes += write_sources(program, (nn.MultiheadAttention,) if ATTENTION in decompose else ())
    return tuple(changes)
