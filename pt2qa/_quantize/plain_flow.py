"""A pair's quantization as a Python module, executed and compared with the pair.

The module exports the model, prepares it with the quantizer and its edits, calibrates and converts.  It does without
pt2qa where that gives the pair's outputs bit for bit; where it does not, because quantizers fail on what
:func:`pt2qa.capture` rewrites or skip it, the rewriting is added as code; and where that does not help either, the
module uses pt2qa.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._ambient import callers_device, torch_defaults
from pt2qa._capture.exporting import State
from pt2qa._capture.inputs import device_of
from pt2qa._capture.normalise import ATTENTION, RECURRENT
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.handles import assign_handles, name_of, names_of
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import error_sums
from pt2qa._printable import clean_lines
from pt2qa._quantize.calibration import Call, read_calls
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._ranks import active
from pt2qa._report.notes import Note
from pt2qa._report.rows import Environment
from pt2qa._simulator.batches import as_batch, flatten_batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.quant_ops import serves_quantization
from pt2qa._simulator.simulator import tensors_equal
from pt2qa._simulator.verification import graph_outputs, values_by
from pt2qa.errors import PluginError, Pt2qaError, SelectionError
from pt2qa.overrides.parameters import changes_of, with_folded_norms
from pt2qa.overrides.plan import BEFORE_CALIBRATION, OverridePlan
from pt2qa.plugins import GenericPlugin, quantizer
from pt2qa.plugins.code import first_line, needed, needed_imports
from pt2qa.plugins.registry import quantizer_code


@dataclass(frozen=True, slots=True)
class PlainFlow:
    """The code that quantizes a model as a pair was quantized, and what came of executing it.

    ``equal`` says whether it was executed and gave the pair's outputs, bit for bit; ``verified`` is ``equal``,
    ``equal, with ...`` and why that is needed, ``differs: ...`` or ``not run: ...``.
    """

    code: str
    verified: str
    equal: bool = False


@torch_defaults
@exports
def plain_flow(pair: QuantizedPair, *, about: str = "", verify: bool = True, progress: bool | None = None) -> PlainFlow:
    """The code that quantizes a model as a pair was quantized: the same quantizer, options, edits and calibration.

    It is executed on the model: ``torch.export``, prepare, calibration on the pair's batches, convert.  The outputs of
    the result on the first batch must be those of ``pair.quantized`` bit for bit.

    ``about`` is the first line of the code's docstring.  Without ``verify`` the code is not executed, and has all of
    capture's rewriting, needed or not.
    """
    recipe, capture = pair.recipe, pair.capture
    if recipe is None or capture is None:
        raise SelectionError(
            "this pair was not made by pt2qa.quantize, so how to quantize its model again is unknown. "
            "Quantize the capture with pt2qa.quantize(capture, quantizer, calibration)."
        )
    about = about or f"{pair.model}, quantized by {pair.quantizer}."
    changed = recorded(capture)
    graph = capture.module() if pair.float_graph is None else pair.float_graph
    text = functools.partial(plain_text, capture, recipe, graph, quantizer_text(recipe, graph), about)
    reason = _reason_not_to_run(pair, recipe, capture) if verify else "verification is switched off"
    if reason or recipe.data is None:
        return PlainFlow(text(changed).text, f"not run: {reason}")
    trial = _Trial(pair, recipe, capture, replace(recipe.data, progress=progress))
    plain = text(())
    own_options = plain.asks and not isinstance(recipe.plugin, GenericPlugin)
    found = f"{pair.quantizer} has options that are pt2qa's own" if own_options else trial.difference(plain)
    if not found:
        return PlainFlow(plain.text, "equal", equal=True)
    if not own_options:
        # Capture writes the sources of all ops, and records where they are not the obvious ones.
        written = changed if {*changed} & {*SOURCE_RULES} else (*changed, SOURCE_RULES[0])
        rewritten = trial.difference(text(written))
        if not rewritten:
            needed = trial.needed(written, text)
            return PlainFlow(
                text(needed).text,
                f"equal, with capture's rewriting ({', '.join(needed)}); without it: {found}",
                equal=True,
            )
        found += f"; with capture's rewriting as code: {rewritten}"
    whole = pt2qa_text(capture, recipe, about)
    beyond = trial.difference(whole)
    if beyond:
        return PlainFlow(plain.text, f"differs: {found}; with pt2qa: {beyond}")
    return PlainFlow(whole.text, f"equal, with pt2qa; without it: {found}", equal=True)


def kept_flow(pair: QuantizedPair, about: str, verify: bool, progress: bool | None) -> tuple[PlainFlow, list[str]]:
    """The same, and a note if Ctrl-C stopped the verification: what an analysis has found is not lost."""
    try:
        return plain_flow(pair, about=about, verify=verify, progress=progress), []
    except KeyboardInterrupt:
        code = plain_flow(pair, about=about, verify=False).code
        return PlainFlow(code, "not run: interrupted"), [Note("interrupted: the code was not verified", "interrupted")]


def _reason_not_to_run(pair: QuantizedPair, recipe: Recipe, capture: Capture) -> str:
    """Why no code can be compared with a pair; empty if it can."""
    if recipe.train is not None:
        return "the pair was trained, which is not repeated"
    if capture.eager is None:
        return "the capture does not hold the model"
    if recipe.data is None:
        return "the calibration batches were an iterator, which is used up"
    if active() is not None:
        return "it was calibrated on the data of several processes"
    try:
        first, again = (next(read_calls(capture, pair.reference, recipe.data), None) for _ in range(2))
    except Pt2qaError as error:
        return f"the calibration batches cannot be read again: {error}"
    if first is None:
        return "the calibration batches cannot be read again: there are none"
    if not tensors_equal(first, again):
        return "the calibration batches change from one reading to the next, as those of a loader that shuffles do"
    return ""


@dataclass(frozen=True)
class _Trial:
    """Executes code on the model and the batches that a pair was made of."""

    pair: QuantizedPair
    recipe: Recipe
    capture: Capture
    data: Data

    def difference(self, text: FlowText) -> str:
        """How the outputs on the first batch differ from the pair's, or the error; empty if they are equal."""
        found = self._converted(text)
        if isinstance(found, str):
            return found
        quantized = self.pair.converted
        expected, actual = self._outputs(quantized), self._outputs(found)
        if tensors_equal(expected, actual):
            return ""
        return f"{_agreement(expected, actual)}{self._first_difference(quantized, found)}"

    def needed(self, rules: tuple[str, ...], text: Callable[[tuple[str, ...]], FlowText]) -> tuple[str, ...]:
        """The rules without those that make no difference."""
        for rule in rules:
            fewer = tuple(other for other in rules if other != rule)
            if fewer and not self.difference(text(fewer)):
                rules = fewer
        return rules

    def _converted(self, text: FlowText) -> GraphModule | str:
        """What the code makes of the model, or the error."""
        assert self.capture.eager is not None
        names: dict[str, Any] = {"__name__": "quantizer"}
        bar = self.data.bar("verify the code", of=self._calls())
        with_kwargs = bool(self.capture.kwargs)
        calibration = (call if with_kwargs else call[0] for call in bar)
        inputs = (self.capture.args, self.capture.kwargs) if with_kwargs else (self.capture.args,)
        given = {"quantizer": self.recipe.plugin.build(self.capture.module(), qat=self.recipe.qat)} if text.asks else {}
        with warnings.catch_warnings(), callers_device(device_of(self.capture.eager)), State(self.capture.eager):
            warnings.simplefilter("ignore")  # those of torch; the pair's own quantization has shown them
            try:
                exec(compile(text.text, "quantizer.py", "exec", dont_inherit=True), names)
                made: GraphModule = names["quantize"](
                    self.capture.eager, *inputs, calibration, dynamic_shapes=self.capture.dynamic_shapes, **given
                )
            except Exception as error:
                return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            finally:
                bar.close()
        return made

    def _calls(self) -> Iterator[Call]:
        return read_calls(self.capture, self.pair.reference, self.data)

    @functools.cached_property
    def _values(self) -> list[Any]:
        """The first batch, flat."""
        return flatten_batch(self.pair.quantized, as_batch(*next(self._calls()), self.pair.quantized))

    def _outputs(self, graph: GraphModule, visit: Callable[[Node, Any], Any] = lambda node, value: None) -> list[Any]:
        return list(pytree.tree_leaves(graph_outputs(graph, self._values, visit)))

    def _first_difference(self, quantized: GraphModule, converted: GraphModule) -> str:
        """The first op of the pair whose value differs; empty if no op of both does."""
        assign_handles(converted)
        names, found = names_of(converted), list[str]()
        values = values_by(lambda node: name_of(node, names), converted, self._values)

        def compare(node: Node, value: Any) -> None:
            name = None if serves_quantization(node) else name_of(node, self.pair.names)
            if not found and name in values and not tensors_equal(value, values[name]):
                found.append(name)

        self._outputs(quantized, compare)
        return f", first at {found[0]}" if found else ""


def _agreement(expected: list[Any], actual: list[Any]) -> str:
    """The lowest SQNR of the floating-point outputs, if that says how two runs differ."""
    alike = len(expected) == len(actual) and all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(expected, actual, strict=False)
    )
    if not alike:
        return "outputs of other shapes or types"
    floats = [(a, b) for a, b in zip(expected, actual, strict=True) if a.is_floating_point()]
    ratios = [ratio for a, b in floats if not math.isnan(ratio := error_sums(a, b).sqnr)]
    return f"outputs agree to {min(ratios):.1f} dB" if ratios and min(ratios) < math.inf else "outputs differ"


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
    """The flow without pt2qa: the quantizer's ``code``, and the part of capture's rewriting that ``rules`` name."""
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
