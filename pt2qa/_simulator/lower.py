"""From a converted graph and its float reference to a :class:`Program`.

The steps are those of the converted graph.  The reference contributes the float values of the constants:
``convert_pt2e`` folds a quantized weight into integers, so the float weight is looked up in the reference graph, at the
same argument of the op with the same handle.  With every site off, the program computes the reference; with every site
on, it computes what the converted graph computes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import (
    BODIES,
    OpName,
    attribute_of,
    handle_of,
    input_handles,
    name_of,
    nested_graphs,
    op_of,
    part_name,
    parts_of,
    walk,
)
from pt2qa._graph.internals.nodes import VALUE, calls_guards, module_stack
from pt2qa._graph.internals.torch import OpOverload, pytree
from pt2qa._graph.internals.torchao import is_observer
from pt2qa._grouping import grouped
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.float_constants import FloatConstants, Path, constant_of, run_on_constants
from pt2qa._simulator.fused import converted_site, fused_site
from pt2qa._simulator.lifetimes import has_living_alias, mark_lifetimes, memory_of, slots_in, written_value
from pt2qa._simulator.products import arguments_of, constant_role
from pt2qa._simulator.program import Constant, Nested, Program, QuantParams, Region, Site, Slot, Step, unrounded
from pt2qa._simulator.stored import WEIGHT_CACHE, Integers, Stored, ValueCache, read, shares_memory
from pt2qa.errors import PairingError


class _UnknownScaleError(PairingError):
    """A scale is computed in a way that no site can follow; of a nested graph, all is one site then."""


@dataclass(frozen=True, slots=True)
class _Folded:
    """A value that does not depend on the batch: its value on both sides, and how it was quantized.

    The quantized one is :class:`Stored` if it is rounded.
    The reference is None if it must still be looked up in the float graph, at the argument of the op that reads it.
    """

    quantized: Any
    reference: Any
    params: QuantParams | None = None
    attribute: str = ""
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class _Integers:
    """The output of a quantize node; its dequantize nodes form the site."""

    node: Node
    source: Slot | _Folded


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A ``choose_qparams`` node or one of its outputs; it becomes a step only if something besides a site reads it."""

    node: Node


def lower(
    quantized: GraphModule, reference: GraphModule, names: Mapping[int, OpName], weight_cache: int = WEIGHT_CACHE
) -> Program:
    """Lowers what ``convert_pt2e`` returned, weights folded or not.

    ``reference`` is the float graph as ``prepare`` rewrote it, with the same handles; ``names`` is what to call each;
    ``weight_cache`` how many bytes of rounded constants are kept in float.

    Raises:
        PairingError: the quantized graph still has observers, or nothing in it is quantized.
    """
    program = _Lowering(quantized, reference, names, ValueCache(weight_cache)).run()
    if not program.sites:
        raise PairingError(
            "nothing in the quantized graph is quantized: it has no quantize or dequantize op. "
            "Expected what convert_pt2e returns after a quantizer annotated ops and calibration ran."
        )
    return program


class _Lowering:
    def __init__(
        self,
        quantized: GraphModule,
        reference: GraphModule,
        names: Mapping[int, OpName],
        cache: ValueCache,
        owner: str = "",
    ) -> None:
        """``owner`` is what a nested graph is called, such as ``while_loop.body``."""
        self.graph_module, self.cache, self.owner = quantized, cache, owner
        self.order = {node: position for position, node in enumerate(quantized.graph.nodes)}
        self.names = names
        self.floats = FloatConstants(reference, quantized)
        self.values: dict[Node, Any] = {}
        self.roots: dict[Node, Node] = {}
        """For each in-place op, the value that it writes to, which is the result of no in-place op."""
        self.slots = 0
        self.inputs: list[tuple[int, str, int]] = []
        self.constants: list[Constant] = []
        self.steps: list[Step] = []
        self.sites: list[Site] = []
        self.producers: dict[int, int] = {}
        self.notes: list[str] = []
        self.rounded_inside: dict[Node, int] = {}
        self.site_slots: dict[tuple[Node, str], Slot] = {}
        self.constant_slots: dict[tuple[Node, int | None], Slot] = {}
        self.dequantized: dict[tuple[Any, ...], Stored] = {}
        self.same_sites: dict[tuple[int, str], int] = {}
        self.parts = parts_of(self.graph_module.graph)
        self.may_share = True

    # -- the walk ------------------------------------------------------------------------------------------------

    def run(self) -> Program:
        outputs: Any = ()
        input_numbers = {} if self.owner else input_handles(self.graph_module)
        writers = [node for node in self.order if op_rules.mutates_first_argument(node.target)]
        self.written = {memory_of(node) for node in writers}
        # convert gives every reader its own dequantize node, so a write to one of them does not affect the others.
        self.written_in_memory = {written_value(node) for node in writers if self._renamed(node) is None}
        for node in self.order:
            if node.op == "placeholder":
                slot = self._new_slot()
                handle = input_numbers.get(node)
                name = self.names[handle].name if handle is not None and handle in self.names else node.name
                name = f"{self.owner}/input[{len(self.inputs)}]" if self.owner else name
                self.inputs.append((slot.number, name, -1 if handle is None else handle))
                self.values[node] = slot
            elif node.op == "get_attr":
                self.values[node] = self._constant(node)
            elif node.op == "output":
                outputs = self._template(node.args[0], node, None, path=(0,))
            elif calls_guards(node):
                continue
            else:
                self._call(node)
        regions = _find_regions(self.steps, self.sites, self.producers)
        given = [slot for slot, _, _ in self.inputs] + [constant.slot for constant in self.constants]
        mark_lifetimes(self.steps, outputs, given)
        return Program(
            slots=self.slots,
            inputs=tuple(slot for slot, _, _ in self.inputs),
            input_names=tuple(name for _, name, _ in self.inputs),
            input_handles=tuple(handle for _, _, handle in self.inputs),
            constants=tuple(self._beside_weights()),
            steps=tuple(self.steps),
            sites=tuple(self._with_readers()),
            regions=tuple(regions),
            outputs=outputs,
            producers=self.producers,
            notes=tuple(dict.fromkeys(self.notes)),
            may_share=self.may_share,
            weight_cache=self.cache.size,
        )

    def _call(self, node: Node) -> None:
        source = self.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if (quant_ops.is_choose_qparams(node) and not isinstance(source, _Folded)) or (
            node.target is operator.getitem and isinstance(source, _Deferred)
        ):
            self.values[node] = _Deferred(node)
        elif quant_ops.is_quantize(node):
            self.values[node] = _Integers(node, self._value(node.args[0]))
        elif quant_ops.is_dequantize(node):
            self.values[node] = self._dequantize(node)
        elif quant_ops.is_half_cast(node):
            self.values[node] = self._half_cast(node)
        else:
            folded = self._fold(node)
            self.values[node] = self._op(node) if folded is None else folded

    def _value(self, arg: Any) -> Any:
        """The value that a node has at this point of the graph, after in-place writes to it."""
        return self.values[self.roots.get(arg, arg)]

    def _new_slot(self) -> Slot:
        self.slots += 1
        return Slot(self.slots - 1)

    # -- constants -----------------------------------------------------------------------------------------------

    def _constant(self, node: Node) -> _Folded:
        value = constant_of(self.graph_module, node)
        reference = quant_ops.strip_quantization(value) if isinstance(value, GraphModule) else value
        return _Folded(value, reference, attribute=str(node.target), is_parameter=isinstance(value, nn.Parameter))

    def _fold(self, node: Node) -> _Folded | None:
        """Computes an op that reads only constants; None if the op must be a step.

        An op that reads a quantized constant stays a step, so that reports show its error.
        """
        nodes = node.all_input_nodes
        folded = [self._value(arg) for arg in nodes]
        if (
            not nodes
            or not all(isinstance(value, _Folded) and not isinstance(value.quantized, GraphModule) for value in folded)
            or op_rules.mutates_first_argument(node.target)
            or op_rules.is_random(node.target)
            or node.op != "call_function"
            or any(memory_of(arg) in self.written for arg in nodes)
        ):
            return None
        params = next((value.params for value in folded if value.params is not None), None)
        only_moves = len(nodes) == 1 and op_rules.only_moves(node.target)
        if params is not None and not only_moves and not quant_ops.is_choose_qparams(node):
            return None
        has_reference = all(value.reference is not None for value in folded)
        stored = folded[0].quantized
        return _Folded(
            self._moved(node, stored) if only_moves and isinstance(stored, Stored) else self._computed(node),
            run_on_constants(node, lambda arg: self._value(arg).reference) if has_reference else None,
            params=params,
            attribute=folded[0].attribute,
            is_parameter=folded[0].is_parameter,
        )

    def _tensor(self, node: Node) -> Any:
        """The constant value of a node; None if it depends on the batch."""
        value = self._value(node)
        return read(value.quantized) if isinstance(value, _Folded) else None

    def _computed(self, node: Node) -> Any:
        return run_on_constants(node, self._tensor)

    def _moved(self, node: Node, stored: Stored) -> Stored:
        """A rounded constant after an op that changes no value."""
        source = stored.value()
        view = shares_memory(run_on_constants(node, lambda _: source), source)
        return Stored(lambda: run_on_constants(node, lambda _: stored.value()), None if view else self.cache)

    # -- quantization --------------------------------------------------------------------------------------------

    def _dequantize(self, node: Node) -> Any:
        value = self._value(node.args[0])
        if isinstance(value, _Folded):
            params = quant_ops.read_params(node, self._tensor)
            stored = self._dequantized(node, read(value.quantized), params)
            return replace(value, quantized=stored, reference=None, params=params)
        if not isinstance(value, _Integers):
            return self._op(node)
        if isinstance(value.source, _Folded):
            integers = run_on_constants(value.node, self._tensor, read(value.source.quantized))
            params = quant_ops.read_params(node, self._tensor)
            return replace(value.source, quantized=self._dequantized(node, integers, params), params=params)
        matching = value.node.args[1:] == node.args[1:] or quant_ops.is_dynamic_per_tensor(value.node)
        if not matching:
            self.notes.append(
                f"{self._reader_name(node)}: a value is quantized and dequantized with different parameters"
            )
        alone = node in self.written_in_memory
        origin = value.node.args[0]
        readers = [*value.node.users, *(origin.users if isinstance(origin, Node) else ())]
        if node in self.written and any(self.order[reader] > self.order[node] for reader in readers):
            self.notes.append(
                f"{self._reader_name(next(iter(node.users)))}: an in-place op writes to a quantized value or a view of "
                "it; convert copies quantized values, so other readers miss the write"
            )
        exact = matching and not node.kwargs
        key = (value.node, node.name if alone or not exact else "")
        if key not in self.site_slots:
            self.site_slots[key] = self._activation_site(value, node, exact=exact, alone=alone)
        return self.site_slots[key]

    def _dequantized(self, node: Node, integers: Tensor, params: QuantParams) -> Stored:
        """A dequantized constant; equal dequantize nodes, as for the steps of an LSTM, share one result.

        Tensors are compared by identity, which is safe because the graph and these results keep them alive.
        """
        given = {arg: self._tensor(arg) for arg in node.all_input_nodes[1:]}
        args = tuple(given[arg] if isinstance(arg, Node) else arg for arg in node.args[1:])
        key = (
            node.target,
            str(node.kwargs),
            *(id(arg) if isinstance(arg, Tensor) else arg for arg in (integers, *args)),
        )
        plain = quant_ops.is_plain_dequantize(node)
        known = Integers.of(integers, params.scale, params.zero_point, params.axis) if plain else None

        def make() -> Any:
            return run_on_constants(node, given.__getitem__, integers)

        return self.dequantized.setdefault(key, Stored(make if known is None else known, self.cache))

    def _half_cast(self, node: Node) -> Any:
        value = self._value(node.args[0])
        if isinstance(value, _Folded):
            params = value.params or quant_ops.read_params(node, self._tensor)
            source = value.quantized
            float32 = self._computed(node).dtype == torch.float32
            made = Stored(lambda: run_on_constants(node, lambda _: read(source)), self.cache if float32 else None)
            return replace(value, quantized=made, params=params)
        return self._op(node)

    def _activation_site(self, value: _Integers, dequantize: Node, *, exact: bool, alone: bool) -> Slot:
        source = value.source
        assert isinstance(source, Slot)
        params = quant_ops.read_params(value.node, self._tensor)
        converted = converted_site(value.node, dequantize, self._require_tensor)
        function = fused_site(value.node, params) if exact else None
        if function is None:
            self.notes.append(
                f"{value.node.target} to {params.dtype} runs as the converted op: it has no exact fused form"
            )
        result = self._new_slot()
        shareable = quant_ops.is_static_per_tensor(value.node) and not alone
        parameters = value.node.args[1:], dequantize.args[1:], dequantize.kwargs
        identity = str(parameters) if shareable else f"slot {result.number}"
        first = self.same_sites.setdefault((source.number, identity), result.number)
        made = unrounded(self.steps, self.producers, source.number)
        producer = self.producers.get(made)
        origin = self.steps[producer] if producer is not None else None
        input_names = {slot: (name, handle) for slot, name, handle in self.inputs}
        name, handle = (origin.name, origin.handle) if origin is not None else input_names[made]
        self._append(
            Step(
                index=len(self.steps),
                out=result.number,
                reads=(source.number,),
                function=function or converted,
                converted=converted,
                args=(source,),
                name=name,
                op="quantize",
                node=dequantize.name,
                site=len(self.sites),
                duplicate_of=None if first == result.number else first,
            )
        )
        self.sites.append(
            Site(
                index=len(self.sites),
                kind="activation",
                name=name,
                op=origin.op if origin is not None else "input",
                handle=handle,
                readers=(),
                params=params,
                source=source.number,
                result=result.number,
                exact=function is not None,
            )
        )
        return result

    def _require_tensor(self, node: Node) -> Any:
        value = self._tensor(node)
        if value is None:
            raise _UnknownScaleError(
                f"the quantized graph computes a scale or zero point, {node.name} ({node.target}), in a way that pt2qa "
                "does not support. Expected a constant, or choose_qparams of the value that is quantized."
            )
        return value

    # -- ops -----------------------------------------------------------------------------------------------------

    def _op(self, node: Node) -> Slot:
        handle, op = handle_of(node), op_of(node.target)
        unknown = OpName(f"{op} (no handle, {node.name})", "", "", op)
        known = unknown if handle is None else self.names.get(handle, unknown)
        function = self._function(node)
        in_place = op_rules.in_place_spelling(function) if _keeps_dtype(node) else None
        mutates, keeps_strides = op_rules.mutates_first_argument(node.target), False
        functional = self._renamed(node) if mutates else None
        if functional is not None and isinstance(node.target, OpOverload):
            function, in_place, mutates = functional, node.target, False
            keeps_strides = not op_rules.returns_view(functional)
        args, kwargs = (self._template(part, node, handle) for part in (node.args, node.kwargs))
        slots = list(dict.fromkeys(slots_in((args, kwargs))))
        constant_numbers = {constant.slot for constant in self.constants}
        out = self._new_slot()
        self._append(
            Step(
                index=len(self.steps),
                out=out.number,
                reads=tuple(slot for slot in slots if slot not in constant_numbers),
                constants=tuple(slot for slot in slots if slot in constant_numbers),
                function=function,
                args=args,
                kwargs=kwargs,
                name=part_name(known.name, node, self.parts.get(node, 0)),
                op=known.op,
                module=known.module,
                module_type=known.module_type,
                handle=-1 if handle is None else handle,
                module_stack=_module_stack(node),
                node=node.name,
                mutates=mutates,
                in_place=in_place,
                keeps_strides=keeps_strides,
            )
        )
        if op_rules.mutates_first_argument(node.target):
            written = node.args[0]
            assert isinstance(written, Node)
            root = self.roots.get(written, written)
            self.values[root] = out
            self.roots[node] = root
            if mutates:
                self.may_share = False
        return out

    def _renamed(self, writer: Node) -> OpOverload | None:
        """The op that gives what an in-place op writes as a value of its own, if no other name reads that memory."""
        functional = op_rules.functional_spelling(writer.target) if isinstance(writer.target, OpOverload) else None
        return None if functional is None or has_living_alias(writer, self.order) else functional

    def _function(self, node: Node) -> Callable[..., Any]:
        if node.op == "call_module":
            module = self.graph_module.get_submodule(str(node.target))
            if is_observer(module):
                raise PairingError(
                    f"the quantized graph still has the observer {node.target} ({type(module).__name__}). "
                    "Expected the graph that convert_pt2e returns, not the prepared one."
                )
            return module
        if node.op == "call_method":
            method = str(node.target)
            return lambda self, *args, **kwargs: getattr(self, method)(*args, **kwargs)
        if node.target is torch.ops.aten.detach_.default:
            # The in-place form would detach the value itself from gradients.
            return torch.ops.aten.detach.default
        return node.target  # type: ignore[return-value]

    def _template(self, part: Any, reader: Node, handle: int | None, path: Path = ()) -> Any:
        """``part`` with slots in place of nodes; ``path`` is its position in the arguments."""
        if isinstance(part, Node):
            return self._slot(part, reader, handle, path)
        if isinstance(part, (list, tuple)):
            items = [self._template(item, reader, handle, (*path, key)) for key, item in enumerate(part)]
            return items if isinstance(part, list) else tuple(items)
        if isinstance(part, dict):
            return {key: self._template(item, reader, handle, (*path, key)) for key, item in part.items()}
        if isinstance(part, slice):
            ends = (self._template(end, reader, handle, path) for end in (part.start, part.stop, part.step))
            return slice(*ends)
        return part

    def _slot(self, arg: Node, reader: Node, handle: int | None, path: Path) -> Any:
        value = self._value(arg)
        if isinstance(value, Slot):
            return value
        if isinstance(value, _Folded):
            return self._constant_slot(arg, value, reader, handle, path)
        # The model itself reads an integer tensor or a scale: compute it as the converted graph does.
        node = value.node
        self.notes.append(
            f"{self._reader_name(reader)} reads {node.target} directly; the reference reads the same values"
        )
        slot = self._op(node)
        self.values[node] = slot
        return slot

    def _constant_slot(self, arg: Node, value: _Folded, reader: Node, handle: int | None, path: Path) -> Slot:
        reference, attribute, is_parameter = value.reference, value.attribute, value.is_parameter
        stored, quantized = value.quantized, read(value.quantized)
        written, known = memory_of(arg) in self.written, None
        if isinstance(quantized, Tensor):
            known = self.floats.lookup(reader, path, quantized, at_start=written and reference is not None)
        if known is not None:
            reference, attribute, is_parameter = known.value, known.attribute, known.is_parameter
        elif reference is None:
            self.notes.append(
                f"{self._reader_name(reader)}: no float value for its argument {path} in the reference; "
                "the reference reads the quantized one"
            )
        key = (arg, None if reference is None else id(reference))
        if key in self.constant_slots:
            return self.constant_slots[key]
        if reference is None:
            reference = stored = quantized
        slot = self._new_slot()
        self.constant_slots[key] = slot
        name, op, number = self._reader_name(reader), op_of(reader.target), -1 if handle is None else handle
        position = path[0] if path and isinstance(path[0], int) else -1
        site = None
        if isinstance(quantized, GraphModule):
            reference = self.floats.nested(reader, path) or reference
            found = self._nested(quantized, reference, slot, reader)
            if isinstance(found, Nested):
                reference = stored = found
            else:
                site = found
        elif value.params is not None:
            kind = constant_role(op, position, is_parameter)
            site = len(self.sites)
            self.sites.append(Site(site, kind, name, op, number, (), value.params, slot.number, slot.number, True))
        self.constants.append(
            Constant(
                slot=slot.number,
                reference=reference,
                stored=stored,
                attribute=attribute,
                is_parameter=is_parameter,
                reader=name,
                op=op,
                handle=number,
                argument=position,
                site=site,
                mutated=written,
            )
        )
        return slot

    # -- nested graphs -------------------------------------------------------------------------------------------

    def _nested(self, body: GraphModule, reference: GraphModule, slot: Slot, reader: Node) -> Nested | int | None:
        """A nested graph whose sites become sites of this program, or the one site that is all of its quantization.

        None if nothing in it is quantized.
        """
        owner, op = self._reader_name(reader), op_of(reader.target)
        name = f"{owner}.{next(label for label, each in nested_graphs(reader, self.graph_module) if each is body)}"
        try:
            program = _Lowering(body, reference, self.names, self.cache, name).run() if op in BODIES else None
        except _UnknownScaleError as error:
            program = None
            self.notes.append(str(error))
        if program is not None:
            self.notes += program.notes
            constants = self._constant_inputs(reader, program)
            found = [self._own_site(site, program, constants) for site in program.sites]
            place = len(self.sites), slot.number
            for number, (before, site) in enumerate(zip(program.sites, found, strict=True), len(self.sites)):
                if before.source in constants and site.kind != "activation":
                    self.rounded_inside.setdefault(constants[before.source], number)
            self.sites += [
                replace(site, index=place[0] + number, source=place[1], result=place[1], nested=True)
                for number, site in enumerate(found)
            ]
            return Nested(program, tuple(range(place[0], len(self.sites)))) if found else None
        dtypes = [
            quant_ops.read_params(each.node, lambda _: None).dtype
            for each in walk(body)
            if quant_ops.is_quantize(each.node)
        ]
        if not dtypes:
            return None
        params = QuantParams(", ".join(sorted(set(dtypes))))
        number, handle, at = len(self.sites), handle_of(reader), slot.number
        handle = -1 if handle is None else handle
        self.sites.append(Site(number, "activation", name, op, handle, (), params, at, at, exact=False, nested=True))
        return number

    def _constant_inputs(self, reader: Node, program: Program) -> dict[int, Node]:
        """The inputs of a nested graph that are constants around it: weights, mostly; by slot."""
        leaves = pytree.tree_leaves(reader.args)
        read = [attribute_of(self.graph_module, leaf) for leaf in leaves]
        first = max(number for number, value in enumerate(read) if isinstance(value, GraphModule)) + 1
        given = zip(program.inputs, leaves[first:], strict=False)
        return {slot: leaf for slot, leaf in given if isinstance(leaf, Node) and isinstance(self._value(leaf), _Folded)}

    def _own_site(self, site: Site, program: Program, constants: Collection[int]) -> Site:
        """A site of a nested graph; if it rounds a weight, which is an input there, it is the weight's reader's."""
        for step in program.steps if site.source in constants else ():
            for argument, slot in arguments_of(step):
                role = constant_role(step.op, argument, is_parameter=False)
                if slot == site.result and step.site is None and role != "activation":
                    return replace(site, kind=role, name=step.name, op=step.op, handle=step.handle)
        return site

    def _reader_name(self, node: Node) -> str:
        return name_of(node, self.names) or node.name

    def _append(self, step: Step) -> None:
        self.steps.append(step)
        self.producers[step.out] = step.index

    def _beside_weights(self) -> list[Constant]:
        weights = {each.slot: each.site for each in self.constants if each.site is not None}
        beside = {
            slot: weights[own]
            for step in self.steps
            for slot in step.constants
            for own in step.constants
            if own in weights
        }
        inside = {
            slot.number: self.rounded_inside[node]
            for (node, _), slot in self.constant_slots.items()
            if node in self.rounded_inside
        }
        return [
            each
            if each.site is not None
            else replace(each, weight_site=beside.get(each.slot), nested_site=inside.get(each.slot))
            for each in self.constants
        ]

    def _with_readers(self) -> list[Site]:
        ops = (step for step in self.steps if step.site is None)
        readers = grouped((slot, step.name) for step in ops for slot in (*step.reads, *step.constants))
        return [site if site.nested else replace(site, readers=tuple(readers[site.result])) for site in self.sites]


def _keeps_dtype(node: Node) -> bool:
    """Whether an op's result has the dtype of its first argument, so that it may overwrite it."""
    source = node.args[0] if node.args else None
    value, first = node.meta.get(VALUE), source.meta.get(VALUE) if isinstance(source, Node) else None
    return not (isinstance(value, Tensor) and isinstance(first, Tensor)) or value.dtype == first.dtype


def _module_stack(node: Node) -> tuple[tuple[str, str, str], ...]:
    stack = module_stack(node)
    return tuple((str(key), str(path), str(getattr(kind, "__name__", kind))) for key, (path, kind) in stack.items())


def _find_regions(steps: Sequence[Step], sites: Sequence[Site], producers: dict[int, int]) -> list[Region]:
    """Numbers the regions in graph order and writes the number into each op's step.

    Two ops belong to one region if there is no site between them, if nothing else reads the value, and if the second is
    a pointwise op that backends fuse with the first (conv + relu, linear + gelu, conv + batch norm).
    """
    readers = Counter(slot for step in steps for slot in step.reads)
    members: dict[int, list[Step]] = {}
    for step in steps:
        if step.site is not None:
            continue
        before = steps[producers[step.reads[0]]] if step.reads and step.reads[0] in producers else None
        step.region = len(members)
        if before is not None and before.site is None:
            epilogue = step.op in op_rules.EPILOGUES and readers[before.out] == 1
            step.region = before.region if epilogue or step.op == "getitem" else step.region
        members.setdefault(step.region, []).append(step)
    before_it = grouped((site.result, site.index) for site in sites)
    behind_it = grouped((site.source, site.index) for site in sites if site.result != site.source)
    regions = []
    for number, own in members.items():
        around = {site for step in own for slot in (*step.reads, *step.constants) for site in before_it[slot]}
        around |= {site for step in own for site in behind_it[step.out]}
        names, indices = tuple(step.name for step in own), tuple(step.index for step in own)
        regions.append(Region(number, names[0], names, indices, tuple(sorted(around))))
    return regions
