"""The Python module that quantizes a model as a pair was quantized: ``quantizer.py``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.fx import GraphModule

from pt2qa._capture.normalise import ATTENTION, RECURRENT
from pt2qa._capture.program import Capture
from pt2qa._printable import clean_lines
from pt2qa._quantize.pairing import Recipe
from pt2qa._report.rows import Environment
from pt2qa.errors import PluginError
from pt2qa.overrides.parameters import changes_of, with_folded_norms
from pt2qa.overrides.plan import BEFORE_CALIBRATION, OverridePlan
from pt2qa.plugins import quantizer
from pt2qa.plugins.abilities import quantizer_code
from pt2qa.plugins.code import first_line, needed, needed_imports

PARTIAL_WRITE: Final = "partial write"
"""The rule that is a call of torch: ``run_decompositions({})`` makes a program functional."""

_SOURCES: Final = "write_sources(graph_module, OPENED)"
_CALLS: Final = {
    "nested region": "inline_regions(graph_module)",
    "recurrent op": "decompose_recurrent(graph_module, RECURRENT)",
    "attention": "decompose_attention(graph_module)",
    "add of zero": "remove_added_zeros(graph_module)",
    "dead code": "remove_dead_code(graph_module)",
    "scalar": "keep_scalars(graph_module)",
    "padding": "write_out_padding(graph_module)",
    "op source": _SOURCES,
    "shared module": _SOURCES,
}
"""The call of each rule of a change that can be made so, in the order of the passes."""

SOURCE_RULES: Final = ("op source", "shared module")
"""The rules of the one pass that always changes something, recorded or not."""


def recorded(capture: Capture) -> tuple[str, ...]:
    """The rules of a capture's changes that can be written as code, one for each call."""
    changed = {change.rule for change in capture.changes}
    written = {call: rule for rule, call in _CALLS.items() if rule in changed}
    return (*([PARTIAL_WRITE] if PARTIAL_WRITE in changed else []), *written.values())


def rewriting_code(capture: Capture, rules: Collection[str]) -> str:
    """The definition of ``rewrite(graph_module)`` for some of the :func:`recorded` rules; empty if it calls nothing."""
    calls = dict.fromkeys(call for rule, call in _CALLS.items() if rule in rules)
    if not calls:
        return ""
    ops = [target for kind in capture.decompose for target in RECURRENT.get(kind, ())]
    opened = "torch.nn.MultiheadAttention, " if ATTENTION in capture.decompose else ""
    return (
        f"RECURRENT = ({''.join(f'torch.ops.{target}, ' for target in ops)})\n"
        f"OPENED = ({opened})\n\n\n"
        "def rewrite(graph_module):\n"
        '    """Changes how the graph is written, not what it computes, for quantizers that fail or skip ops."""\n'
        + "".join(f"    {call}\n" for call in calls)
    )


_TORCHAO: Final = (
    "import torch",
    "from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train",
    "from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e",
)


@dataclass(frozen=True, slots=True)
class FlowText:
    """A module with the functions ``make_quantizer`` and ``quantize``; if it ``asks``, both take the quantizer."""

    text: str
    asks: bool


def quantizer_text(recipe: Recipe, graph: GraphModule) -> str:
    """The code of the quantizer with the edits of annotations, for which the captured graph is annotated."""
    edits = tuple(edit for edit in recipe.edits if edit.kind not in ("bias", "round", *BEFORE_CALIBRATION))
    return quantizer_code(recipe.plugin, OverridePlan(edits), graph, qat=recipe.qat)


def plain_text(
    capture: Capture, recipe: Recipe, graph: GraphModule, code: str, about: str, rules: Collection[str]
) -> FlowText:
    """The flow without pt2qa for the captured graph, with the part of capture's rewriting that ``rules`` name.

    ``code`` is what :func:`quantizer_text` returned.
    """
    lines, parts = code.splitlines(), ast.parse(code).body
    imports = [part for part in parts if isinstance(part, ast.Import | ast.ImportFrom)]
    defined = [part for part in parts if isinstance(part, ast.FunctionDef | ast.ClassDef) or _is_constant(part)]
    calls = [part for part in parts if part not in imports and part not in defined]
    remarks = [line for line in lines if line.startswith("#")]
    rewriting = rewriting_code(capture, rules)
    functional = ".run_decompositions({})" if PARTIAL_WRITE in rules else ""
    early = any(edit.kind in BEFORE_CALIBRATION for edit in recipe.edits)
    changes = _table("CHANGES", changes_of(recipe.edits, with_folded_norms(graph), capture.names) if early else ())
    return _text(
        capture,
        recipe,
        about,
        imports=list(map(ast.unparse, imports)),
        definitions=f"{rewriting}\n{changes}\n{_values(recipe)}\n" + _lines_of(defined, lines),
        making=[
            *remarks,
            *_lines_of(calls, lines).splitlines(),
            "return Edited(quantizer, {}, CHANGES)" if changes else "return quantizer",
        ],
        export=[
            f"graph_module = torch.export.export({{call}}, strict={capture.strict}){functional}.module()",
            *(["rewrite(graph_module)"] if rewriting else []),
        ],
        asks=_is_read_first(calls, "quantizer"),
    )


def pt2qa_text(capture: Capture, recipe: Recipe, about: str) -> FlowText:
    """The flow with pt2qa, which captures the model and applies the plan."""
    made, qat = _plugin_code(recipe.plugin), ", qat=True" if recipe.qat else ""
    edits = "".join(f"    pt2qa.{edit!r},\n" for edit in recipe.edits if edit.kind not in ("bias", "round"))
    decompose = f", decompose={capture.decompose!r}" if capture.decompose else ""
    return _text(
        capture,
        recipe,
        about,
        imports=["import pt2qa"],
        definitions=f"EDITS = (\n{edits})\n{_values(recipe)}",
        making=[f"return pt2qa.OverridePlan(EDITS).apply_to({made or 'quantizer'}{qat})"],
        export=[f"graph_module = pt2qa.capture({{call}}, strict={capture.strict}{decompose}).module()"],
        asks=not made,
    )


_LATE: Final = {"bias": ("add_to_biases", "BIASES"), "round": ("set_integers", "INTEGERS")}
"""What makes the edits of a calibrated graph, and the name of their values."""


def _values(recipe: Recipe) -> str:
    lines = ""
    for kind, (_, name) in _LATE.items():
        lines += _table(name, [(edit.ops[0], edit.values) for edit in recipe.edits if edit.kind == kind])
    return lines


def _table(name: str, rows: Iterable[object]) -> str:
    """The definition of a constant; empty without rows."""
    lines = "".join(f"    {row!r},\n" for row in rows)
    return f"{name} = (\n{lines})\n" if lines else ""


def _text(
    capture: Capture,
    recipe: Recipe,
    about: str,
    *,
    imports: Sequence[str],
    definitions: str,
    making: Sequence[str],
    export: Sequence[str],
    asks: bool,
) -> FlowText:
    inputs = batch = "args, kwargs"
    run = "prepared(*args, **kwargs)"
    what = "Example inputs are args, a tuple, and kwargs, a dict; calibration has pairs of these."
    if not capture.kwargs:
        inputs, batch = "args", "batch"
        run = "prepared(*batch) if isinstance(batch, (tuple, list)) else prepared(batch)"
        what = "Example inputs are args, a tuple; calibration has tuples like it, or tensors."
    asked = ["quantizer"] if asks else []
    options = ", ".join([*asked, *(["train=None"] if recipe.qat else []), "dynamic_shapes=None"])
    separate = recipe.before_convert
    late = [_LATE[kind] for kind in _LATE if any(edit.kind == kind for edit in recipe.edits)]
    steps = [
        *(line.replace("{call}", f"model, {inputs}, dynamic_shapes=dynamic_shapes") for line in export),
        f"prepared = {'prepare_qat_pt2e' if recipe.qat else 'prepare_pt2e'}"
        f"(graph_module, make_quantizer({''.join(asked)}))",
        *(_TRAINING if recipe.qat else ()),
        "with torch.no_grad():",
        f"    for {batch} in calibration:",
        f"        {run}",
        *([f"{separate.__name__}(prepared)"] if separate is not None else []),
        *(f"{function}(prepared, ops_by_name(prepared.graph), {name})" for function, name in late),
        "return convert_pt2e(prepared)",
    ]
    own = "" if separate is None else inspect.getsource(sys.modules[separate.__module__])
    source = (
        f"{own}\n{definitions}\n"
        f"def make_quantizer({''.join(asked)}):\n"
        f'    """{"The quantizer that you configured, with the edits." if asks else "The configured quantizer."}"""\n'
        f"{_indented(making)}\n"
        f"def quantize(model, {inputs}, calibration, *, {options}):\n"
        f'    """Exports, prepares, calibrates and converts a model in eval mode; returns the quantized graph.\n\n'
        f'    {what}\n    """\n'
        f"{_indented(steps)}"
    )
    body = needed(source, ("make_quantizer", "quantize"))
    used = needed_imports([*imports, own, *_TORCHAO], body)
    needs = "It needs torch and the quantizer, and runs without pt2qa"
    if "import pt2qa" in imports:
        needs = "It needs torch, the quantizer and pt2qa"
    here = Environment.here("")
    versions = f"torch {here.torch}, torchao {here.torchao} and executorch {here.executorch}"
    arguments = ["model", inputs, "calibration", *(["quantizer=quantizer"] if asks else [])]
    told = f"{about}\n\nWritten by pt2qa {here.pt2qa} for {versions}. {needs}. Saved as quantizer.py, it is called so:"
    head = [
        '"""'
        + "\n\n".join(textwrap.fill(part, 100) for part in clean_lines(told).split("\n\n"))
        .replace("\\", "\\\\")
        .replace('"', "'"),
        "",
        "    from quantizer import quantize",
        "",
        f"    quantized = quantize({', '.join(arguments)})",
        '"""',
        "",
    ]
    foot = ["", 'if __name__ == "__main__":', "    print(__doc__)", ""]
    return FlowText("\n".join([*head, *used, "", "", *body, *foot]), asks)


_TRAINING: Final = (
    "if train is not None:",
    "    move_exported_model_to_train(prepared)",
    "    train(prepared)",
    "move_exported_model_to_eval(prepared)",
)


def _lines_of(parts: Sequence[ast.stmt], lines: Sequence[str]) -> str:
    """The source of some statements as it is, decorators too."""
    return "\n".join("\n".join(lines[first_line(part) - 1 : part.end_lineno]) for part in parts)


def _is_constant(part: ast.stmt) -> bool:
    name = part.targets[0] if isinstance(part, ast.Assign) else None
    return isinstance(part, ast.AnnAssign) or (isinstance(name, ast.Name) and name.id[0].isupper())


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in lines)


def _is_read_first(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether statements read a name that none of them has set by then."""
    for statement in statements:
        uses = [node.ctx for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        if uses:
            return any(isinstance(use, ast.Load) for use in uses)
    return False


def _plugin_code(plugin: Any) -> str:
    """A call that makes a plug-in; empty if it is not an installed one."""
    try:
        installed: Any = quantizer(plugin.name)
    except PluginError:
        return ""
    if type(installed) is not type(plugin):
        return ""
    fields = [field.name for field in dataclasses.fields(plugin) if field.init]
    changed = [name for name in fields if getattr(plugin, name) != getattr(installed, name)]
    options = "".join(f", {name}={getattr(plugin, name)!r}" for name in changed)
    return f"pt2qa.quantizer({plugin.name!r}{options})" if options else repr(plugin.name)
