"""A pair's quantization as a Python module, executed and compared with the pair.

The module exports the model, prepares it with the quantizer and its edits, calibrates and converts.  It does without
pt2qa where that gives the pair's outputs bit for bit; where it does not, because quantizers fail on what
:func:`pt2qa.capture` rewrites or skip it, the rewriting is added as code; and where that does not help either, the
module uses pt2qa.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._ambient import callers_device, torch_defaults
from pt2qa._capture.exporting import State
from pt2qa._capture.inputs import device_of
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.handles import assign_handles, name_of, names_of
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import error_sums
from pt2qa._quantize.calibration import Call, read_calls
from pt2qa._quantize.flow_text import SOURCE_RULES, FlowText, plain_text, pt2qa_text, quantizer_text, recorded
from pt2qa._quantize.pairing import QuantizedPair, Recipe
from pt2qa._ranks import active
from pt2qa._report.notes import Note
from pt2qa._simulator.batches import as_batch, flatten_batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.quant_ops import serves_quantization
from pt2qa._simulator.simulator import tensors_equal
from pt2qa._simulator.verification import graph_outputs
from pt2qa.errors import Pt2qaError, SelectionError
from pt2qa.plugins import GenericPlugin


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
        quantized = self.pair.quantized if self.pair.origin is None else self.pair.origin.graph
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
        state = State(self.capture.eager)
        bar = self.data.bar("verify the code", of=self._calls())
        with_kwargs = bool(self.capture.kwargs)
        calibration = (call if with_kwargs else call[0] for call in bar)
        inputs = (self.capture.args, self.capture.kwargs) if with_kwargs else (self.capture.args,)
        given = {"quantizer": self.recipe.plugin.build(self.capture.module(), qat=self.recipe.qat)} if text.asks else {}
        with warnings.catch_warnings(), callers_device(device_of(self.capture.eager)):
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
                state.restore()
        return made

    def _calls(self) -> Iterator[Call]:
        return read_calls(self.capture, self.pair.reference, self.data)

    @functools.cached_property
    def _first(self) -> Call:
        return next(self._calls())

    def _outputs(self, graph: GraphModule, visit: Callable[[Node, Any], Any] = lambda node, value: None) -> list[Any]:
        values = flatten_batch(self.pair.quantized, as_batch(*self._first, self.pair.quantized))
        return list(pytree.tree_leaves(graph_outputs(graph, values, visit)))

    def _first_difference(self, quantized: GraphModule, converted: GraphModule) -> str:
        """The first op of the pair whose value differs; empty if no op of both does."""
        assign_handles(converted)
        names, values, found = names_of(converted), dict[str, Any](), list[str]()

        def keep(node: Node, value: Any) -> None:
            if name := name_of(node, names):
                values[name] = pytree.tree_map_only(Tensor, Tensor.clone, value)

        def compare(node: Node, value: Any) -> None:
            name = None if serves_quantization(node) else name_of(node, self.pair.names)
            if not found and name in values and not tensors_equal(value, values[name]):
                found.append(name)

        self._outputs(converted, keep)
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
