"""Passes that change how a program is written, never what it computes, so that quantizers neither fail nor skip ops.

Each pass takes a program, edits it in place and returns what it did.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.export import ExportedProgram

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise import attention, recurrent
from pt2qa._capture.normalise.attention import ATTENTION, MODULE, decompose_attention
from pt2qa._capture.normalise.dead_code import remove_dead_code
from pt2qa._capture.normalise.editing import complete_users
from pt2qa._capture.normalise.padding import write_out_padding
from pt2qa._capture.normalise.recurrent import RECURRENT, decompose_recurrent
from pt2qa._capture.normalise.regions import inline_regions
from pt2qa._capture.normalise.scalars import keep_scalars
from pt2qa._capture.normalise.sources import write_sources
from pt2qa._capture.normalise.writes import make_writes_functional
from pt2qa._capture.normalise.zeros import remove_added_zeros

PASSES = (make_writes_functional, remove_added_zeros, remove_dead_code, keep_scalars, write_out_padding)
"""In this order, after everything is inlined; dead code goes first, because it is not worth rewriting."""

DECOMPOSABLE = (*RECURRENT, ATTENTION)
"""The kinds of ops that can be decomposed."""

DECOMPOSED = frozenset({recurrent.RULE, attention.RULE})
"""The rules of the changes that decompose them."""

__all__ = ["DECOMPOSABLE", "DECOMPOSED", "PASSES", "normalise"]


def normalise(program: ExportedProgram, decompose: Sequence[str] = ()) -> tuple[Change, ...]:
    """Runs every pass on a program, in place; ``decompose`` has kinds of ops of :data:`DECOMPOSABLE`."""
    complete_users(program)
    changes = list(inline_regions(program))
    changes += decompose_recurrent(program, decompose)
    if ATTENTION in decompose:
        changes += decompose_attention(program)
    for run in PASSES:
        changes += run(program)
    # Last, because the sources describe the ops that remain.
    changes += write_sources(program, (MODULE,) if ATTENTION in decompose else ())
    return tuple(changes)
