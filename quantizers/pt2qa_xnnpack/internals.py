"""What this plug-in reads and writes in graphs, and how ExecuTorch works inside: nothing of it has a public name."""

from __future__ import annotations

import contextlib
import io
import math
import re
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

if TYPE_CHECKING:
    import torch
    from executorch.runtime import Runtime
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

_ANNOTATION: Final = "quantization_annotation"
_VALUE: Final = "val"
METHOD: Final = "forward"
"""What a program runs."""


def keep_in_float(node: Node) -> None:
    """Marks an op, in place, as annotated with nothing to round: later quantizers leave it alone."""
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

    node.meta[_ANNOTATION] = QuantizationAnnotation(_annotated=True)


def provenance_of(node: Node) -> Sequence[Any]:
    """The nodes that a node of an edge program was made from; each has those of its own in ``from_node``."""
    return node.meta.get("from_node") or ()


def debug_handles_of(node: Node) -> list[int]:
    """The numbers by which ExecuTorch's events name a node."""
    found = node.meta.get("debug_handle")
    return [int(each) for each in (found if isinstance(found, tuple | list) else (found,)) if each is not None]


def shape_of(node: Node) -> Sequence[int] | None:
    """The traced shape of a node's value; None if it was not traced."""
    value = node.meta.get(_VALUE)
    return None if value is None else value.shape


# -- ExecuTorch --------------------------------------------------------------------------------------------------------


def has_executorch() -> bool:
    """Whether ExecuTorch is installed; does not import it, which takes seconds."""
    try:
        return find_spec("executorch") is not None
    except ImportError:  # a finder may refuse it
        return False


def executorch_release() -> tuple[int, ...]:
    """ExecuTorch's release, as ``(1, 5)``; does not import it."""
    return tuple(int(number) for number in version("executorch").split(".")[:2])


def runtime() -> Runtime:
    """ExecuTorch's runtime in this process."""
    with warnings.catch_warnings():
        # It says of itself, at every import, that it is experimental.
        warnings.simplefilter("ignore")
        from executorch.runtime import Runtime

        return Runtime.get()


def programs_of_delegates(graph: GraphModule) -> list[ExportedProgram]:
    """What each delegate of a lowered program computes, as it was before XNNPACK took it."""
    from executorch.exir.lowered_backend_module import get_lowered_backend_modules

    return [module.original_module for module in get_lowered_backend_modules(graph)]


def op_name(node: Node) -> str:
    """The name of an op in the edge dialect, such as ``aten::mean``; empty for delegates and their outputs."""
    schema = getattr(node.target, "_schema", None)
    return "" if node.op != "call_function" or schema is None else str(schema.name)


def reason_of(error: BaseException) -> str:
    """An error of ExecuTorch with the one that began it, and the op that was being looked at."""
    chain = [error]
    while (
        inner := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)
    ) is not None:
        chain.append(inner)
    told = dict.fromkeys(f"{type(each).__name__}: {str(each) or 'no message'}" for each in (chain[0], chain[-1]))
    node = _node_in(chain[-1])
    return "; it began with ".join(told) + ("" if node is None else f", at {_place(node)}")


def printed_by(call: Callable[[], object]) -> str:
    """The first line that ExecuTorch writes to stderr during a call that fails: the reason, which no exception has."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(RuntimeError, KeyError):
        call()
    lines = printed.getvalue().splitlines()
    found = (re.fullmatch(r"\[\w+\.(?:cpp|h):\d+\] (.+?)\.?", line) for line in lines if "cpuinfo" not in line)
    return next((match[1] for match in found if match), "")


_COUNTING: Final = "[cpuinfo_utils.cpp:"
_COUNTS: Final = re.escape(_COUNTING) + r"\d+\] (Reading file |Failed to open midr file |CPU info and manual query)"


class _Uncounted(io.TextIOBase):
    r"""A stream to another one, but for the lines in which ExecuTorch counts cores by reading files of Arm phones.

    A piece is held back only while it may become such a line.

    >>> kept = _Uncounted(io.StringIO())
    >>> for piece in ("a\n[", "cpuinfo_utils.cpp:7] ", "Reading file x\nb", "b[x]", "\n[cpu"):
    ...     kept.write(piece) and print(repr(kept.stream.getvalue()))
    'a\n'
    'a\n'
    'a\nb'
    'a\nbb[x]'
    'a\nbb[x]\n'
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.held = stream, ""

    def write(self, text: str) -> int:
        *lines, piece = re.split(r"(?<=\n)", self.held + text)
        self.held = piece if piece.startswith(_COUNTING) or _COUNTING.startswith(piece) else ""
        left = [*(line for line in lines if not re.match(_COUNTS, line)), "" if self.held else piece]
        self.stream.writelines(filter(None, left))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def without_counting() -> Iterator[None]:
    """Drops those lines, which come through sys.stderr when a method is first loaded; all else is written at once."""
    if sys.stderr is None:
        yield
        return
    kept = _Uncounted(sys.stderr)
    try:
        with contextlib.redirect_stderr(kept):
            yield
    finally:
        kept.stream.write(kept.held)


def _node_in(error: BaseException) -> Node | None:
    """The op in the innermost frame that has one."""
    from torch.fx import Node

    found, trace = None, error.__traceback__
    while trace is not None:
        # A pass looks at each node of a graph, and hands it on; the rest of its nodes are what that one reads.
        nodes = (trace.tb_frame.f_locals.get(name) for name in ("target_node", "node"))
        found = next((node for node in nodes if isinstance(node, Node) and node.op == "call_function"), found)
        trace = trace.tb_next
    return found


def _place(node: Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    return f"{op_name(node) or node.name}" + (f" of {path}" if path else "")


class Merged(NamedTuple):
    """Outputs of a delegate that XNNPACK's passes made one value.

    Attributes:
        tag: of the delegate.
        pairs: numbers of outputs: the first, -1 if it is an input of the delegate, and the later one.
    """

    tag: str
    pairs: tuple[tuple[int, int], ...]


def merged_in_delegate(error: BaseException | None) -> Merged | None:
    """Which outputs were merged, from the error with which XNNPACK refuses that; None for any other error.

    The message of ``generate_node_to_external_map`` in ``backends/xnnpack/xnnpack_preprocess.py`` has only the name of
    a node in a renumbered graph. Its frame has that graph, whose outputs are in the delegate's order.
    """
    trace = None if error is None else error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "generate_node_to_external_map":
            graph = trace.tb_frame.f_locals["edge_graph_module"].graph
            outputs: Sequence[Node] = graph.output_node().args[0]
            first = dict.fromkeys(graph.find_nodes(op="placeholder"), -1)
            pairs = [(first.setdefault(node, number), number) for number, node in enumerate(outputs)]
            return Merged(
                next(tag for node in graph.nodes if (tag := node.meta.get("delegation_tag"))),
                tuple((kept, number) for kept, number in pairs if kept != number),
            )
        trace = trace.tb_next
    return None


def outputs_by_delegate(graph: GraphModule) -> dict[str, list[Node]]:
    """What each delegate of a partitioned graph returns, in its order, by the delegate's tag."""
    found: dict[str, list[Node]] = {}
    for node in graph.graph.nodes:
        tag = node.meta.get("delegation_tag")
        if tag is not None and any(user.meta.get("delegation_tag") != tag for user in node.users):
            found.setdefault(tag, []).append(node)
    return found


class Contents(NamedTuple):
    """What is in a ``.pte`` file.

    Attributes:
        delegates: their names.
        operators: the ops outside of them, such as ``aten::mean.out``.
        inputs, outputs: each in words: ``float32 (1, 3, 8, 8)``, with the largest sizes where they may vary.
        methods: all of the file; the others are said of ``forward``, or of the first if there is none.
        size: bytes of all values that it reads or computes.
    """

    delegates: tuple[str, ...]
    operators: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    methods: tuple[str, ...]
    size: int


def contents_of(data: bytes) -> Contents:
    """Reads a ``.pte`` file without running it."""
    # deserialize_pte_binary copies the weights, which follow the program, three times.
    from executorch.exir._serialize._program import _flatbuffer_to_program, _get_extended_header

    header = _get_extended_header(data)
    plans = _flatbuffer_to_program(data if header is None else data[: header.program_size]).execution_plan
    plan = next((each for each in plans if each.name == METHOD), plans[0])
    operators = (f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators)
    return Contents(
        tuple(delegate.id for delegate in plan.delegates),
        tuple(operators),
        tuple(_described(plan.values[index].val) for index in plan.inputs),
        tuple(_described(plan.values[index].val) for index in plan.outputs),
        tuple(each.name for each in plans),
        sum(_bytes(value.val) for value in plan.values),
    )


def program_file(data: bytes) -> Any:
    """All of a ``.pte`` file, constants and the data of delegates included."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(data)


def delegate_as_json(flatbuffer: bytes) -> str:
    """The graph of an XNNPACK delegate as flatc writes it, which is JSON but for infinities and NaN."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import _get_schema_bytes
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    with tempfile.TemporaryDirectory() as folder:
        schema, binary = Path(folder, "schema.fbs"), Path(folder, "graph.bin")
        schema.write_bytes(_get_schema_bytes())
        binary.write_bytes(flatbuffer)
        _flatc_decompile(folder, str(schema), str(binary), ["--raw-binary"])
        return Path(folder, "graph.json").read_text()


def _bytes(value: Any) -> int:
    """Of a value that the program computes or is given: 0 for constants and numbers."""
    from executorch.exir.schema import Tensor
    from executorch.exir.tensor import get_scalar_type

    if not isinstance(value, Tensor) or value.data_buffer_idx:
        return 0
    return int(math.prod(value.sizes) * get_scalar_type(value.scalar_type).itemsize)


def _described(value: Any) -> str:
    from executorch.exir.schema import Tensor, TensorShapeDynamism
    from executorch.exir.tensor import get_scalar_type

    if not isinstance(value, Tensor):
        return type(value).__name__.lower()
    varies = "up to " * (value.shape_dynamism != TensorShapeDynamism.STATIC)
    return f"{str(get_scalar_type(value.scalar_type)).removeprefix('torch.')} {varies}{tuple(value.sizes)}"


# -- quantized graphs --------------------------------------------------------------------------------------------------


class Rounding(NamedTuple):
    """The static parameters of a quantize or dequantize node for whole tensors; the scale as kernels hold it."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype


def rounding_of(node: object) -> Rounding | None:
    """The parameters of a static quantize or dequantize node; None for any other node."""
    if not is_quantize(node, "default") and not is_dequantize(node, "default"):
        return None
    scale, *rest = node.args[1:6]  # type: ignore[attr-defined]
    return Rounding(struct.unpack("f", struct.pack("f", scale))[0], *rest)


def is_quantize(node: object, overload: str = "") -> bool:
    """Whether a node quantizes whole tensors: ``default`` with static parameters, ``tensor`` with computed ones."""
    return _is(node, "quantized_decomposed.quantize_per_tensor", overload)


def is_dequantize(node: object, overload: str = "") -> bool:
    """Whether a node dequantizes whole tensors."""
    return _is(node, "quantized_decomposed.dequantize_per_tensor", overload)


def is_channel_dequantize(node: object) -> bool:
    """Whether a node dequantizes with a scale for each channel, as of a weight."""
    return _is(node, "quantized_decomposed.dequantize_per_channel", "")


def _is(node: object, op: str, overload: str) -> bool:
    target = str(getattr(node, "target", ""))
    return target == f"{op}.{overload}" if overload else target.startswith(f"{op}.")


def without_rounding(graph_module: GraphModule) -> GraphModule:
    """A copy of a converted graph without quantization; its weights are rounded, and held in float."""
    import copy
    from operator import attrgetter

    from torch.fx import GraphModule
    from torch.fx.node import map_arg

    result = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    result.meta.update(graph_module.meta)

    def constant(node: Node) -> Any:
        return attrgetter(str(node.target))(graph_module)

    for number, node in enumerate(list(result.graph.nodes)):
        if not is_dequantize(node) and not is_channel_dequantize(node):
            continue
        source = node.args[0]
        if source.op == "get_attr":
            name = f"in_float_{number}"
            result.register_buffer(name, node.target(*map_arg(node.args, constant), **map_arg(node.kwargs, constant)))
            with result.graph.inserting_before(node):
                value = result.graph.get_attr(name)
            value.meta = {**node.meta}
            node.replace_all_uses_with(value)
        else:
            node.replace_all_uses_with(source.args[0])
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


def is_delegated(node: Node) -> bool:
    """Whether a partitioner took an op of an edge program."""
    return "delegation_tag" in node.meta


def captured_size(size: int | torch.SymInt) -> int:
    """A size with which a model was captured; 1 if it depends on data.

    ``int(size)`` would fix a dynamic size in the user's program.
    """
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def value_of(node: Node) -> object:
    """What a node was traced with; None if it was not."""
    return node.meta.get(_VALUE)
