"""Modules whose weights forward never reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pt2qa._check.context import CheckContext
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """The outermost modules of which no weight is read; those whose result is thrown away are dead code."""
    model, program = context.model, context.capture.program
    names = program.graph_signature.inputs_to_parameters
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is read under one of its names.
    read = {
        id(parameters[names[node.name]])
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in names and node.users
    }
    dead = {change.name.rpartition("/")[0] for change in context.changes if change.rule == "dead code"}
    reported: list[str] = []
    for path, module in model.named_modules():
        own = list(module.parameters())
        within = any(path.startswith(f"{outer}.") for outer in reported)
        called_in_vain = any(f"{name}.".startswith(f"{path}.") for name in dead)
        if not path or not own or within or called_in_vain or any(id(parameter) in read for parameter in own):
            continue
        reported.append(path)
        count = sum(parameter.numel() for parameter in own)
        yield Found(path, f"{_kind(module)} with {count:,} parameters that forward never reads", value=count)


def _kind(module: nn.Module) -> str:
    return type(module).__name__


RULE = Rule(
    id="module-never-called",
    severity="warning",
    title="modules that forward never calls",
    why="A layer that was meant to be there is not, and settings for it by name reach nothing. Heads that only "
    "training uses are stored in vain.",
    fix="call the module in forward, or delete it from the model before it is captured (del model.head)",
    needs=("model", "capture"),
    find=find,
)
