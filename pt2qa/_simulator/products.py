"""Products, the ops that multiply matrices: which there are, what they multiply, and how much of that is rounded.

Coverage, the check, annotations, sensitivity and reconfiguration all use this table.  And flops of any op: torch's
formulas, and our own for ops without one on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor

from pt2qa._graph.internals.torch import OpOverload, TorchDispatchMode, flop_registry
from pt2qa._graph.internals.torch import arguments_of as schema_arguments
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Nested, Program, Step

State = Literal["quantized", "input only", "weight only", "float"]
"""What is rounded of what an op multiplies."""

CONVOLUTIONS: Final = frozenset(
    {f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)} | {"convolution", "_convolution"}
)
WEIGHTED: Final = CONVOLUTIONS | {"linear"}
"""Ops whose second argument is a weight and whose third is a bias."""

RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
CELLS: Final = frozenset(f"{kind}_cell" for kind in RECURRENT)
ATTENTION: Final = frozenset(
    {"scaled_dot_product_attention", "_scaled_dot_product_attention_math"}
    | {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")}
    | {"_scaled_dot_product_flash_attention_for_cpu"}
)
OPAQUE: Final = RECURRENT | CELLS | ATTENTION
"""Ops whose inner products no quantizer can see."""

_FACTORS: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(WEIGHTED, (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), (1, 2)),
    "bilinear": (0, 1, 2),
    **dict.fromkeys(ATTENTION, (0, 1, 2)),
    **dict.fromkeys(CELLS, (0, 1, 2, 3)),
}
"""The arguments that are multiplied, for ops whose other arguments are added: biases, and the mask of attention."""

PRODUCTS: Final = (
    frozenset(_FACTORS)
    | RECURRENT
    | {"mm", "bmm", "mv", "dot", "vdot", "matmul", "linalg_matmul", "einsum", "inner", "tensordot"}
    | {"chain_matmul", "linalg_multi_dot"}
)
"""The ops that carry the arithmetic of a model."""


class Read(NamedTuple):
    """One value that an op reads, as argument number ``argument``; a constant depends on no input, like a weight."""

    argument: int
    constant: bool
    rounded: bool


def reads_of(program: Program, *, nested: bool = False) -> Iterator[tuple[Step, tuple[Read, ...]]]:
    """Each op of a program with the tensors that it reads in the converted model; ``nested`` ones after all others."""
    results = {site.result for site in program.sites}
    constants = {constant.slot: constant for constant in program.constants}
    for step in program.steps:
        if step.site is None:
            reads = (
                Read(argument, slot in constants, slot in results)
                for argument, slot in arguments_of(step)
                if slot not in constants or slot in results or isinstance(constants[slot].reference, Tensor)
            )
            yield step, tuple(reads)
    for constant in program.constants if nested else ():
        if isinstance(constant.stored, Nested):
            yield from reads_of(constant.stored.program, nested=True)


def arguments_of(step: Step) -> Iterator[tuple[int, int]]:
    """Every slot in the arguments of an op, with the number of the argument."""
    numbers = keyword_numbers(step.function)
    keywords = ((numbers.get(name, len(step.args)), value) for name, value in step.kwargs.items())
    for argument, template in (*enumerate(step.args), *keywords):
        for slot in slots_in(template):
            yield argument, slot


def keyword_numbers(target: Any) -> dict[str, int]:
    """The number of each argument of an op by its keyword; empty if the op has no schema."""
    return {argument.name: number for number, argument in enumerate(schema_arguments(target))}


def constant_role(op: str, argument: int, is_parameter: bool) -> Literal["activation", "weight", "bias"]:
    """What a constant is to the op that reads it; what is no parameter is a buffer or a literal."""
    if op in WEIGHTED and argument in (1, 2):
        return "weight" if argument == 1 else "bias"
    return "weight" if is_parameter else "activation"


def state_of(op: str, reads: Iterable[Read]) -> State:
    inputs, weights = _factors(op, reads)
    every = _every(op)
    if not inputs or not weights:
        factors = inputs or weights
        return "quantized" if factors and every(factors) else "float"
    if every(weights) and every(inputs):
        return "quantized"
    return "input only" if any(inputs) else "weight only" if any(weights) else "float"


def is_quantized(op: str, reads: Sequence[Read]) -> bool:
    """Whether coverage counts an op as quantized.

    A product is quantized if all its weights are rounded or, without weights, if everything that it multiplies is.  Any
    other op is quantized if it reads a rounded value.
    """
    if op not in PRODUCTS:
        return any(read.rounded for read in reads)
    inputs, weights = _factors(op, reads)
    factors = weights or inputs
    return bool(factors) and _every(op)(factors)


def _factors(op: str, reads: Iterable[Read]) -> tuple[list[bool], list[bool]]:
    """Whether each input and each weight that a product multiplies is rounded."""
    factors = [read for read in reads if read.argument in _FACTORS.get(op, (read.argument,))]
    inputs, weights = ([read.rounded for read in factors if read.constant is constant] for constant in (False, True))
    return inputs, weights


def _every(op: str) -> Callable[[Iterable[bool]], bool]:
    # The initial states and the biases of a recurrent op stay in float, whatever else is rounded.
    return any if op in RECURRENT | CELLS else all


class FlopCounter(TorchDispatchMode):
    """Adds up in ``total`` the flops of the ops that run under it; nested graphs (``cond``, loops) do not count.

    torch's own ``FlopCounterMode`` also counts by module, and fails if a nested graph runs without gradients.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func.overloadpacket) if isinstance(func, OpOverload) else None
        if formula is None and isinstance(func, OpOverload):
            # A composite op, such as conv2d, is made of ops that may have a formula.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


def own_multiply_adds(op: str, tensors: Sequence[Tensor]) -> int | None:
    """The multiply-adds of an op for which torch has no formula on a CPU; None for all others.

    A recurrent op uses each of its weights once in every step, a bilinear op once in every row; attention multiplies
    queries by keys, and scores by values.
    """
    if op in RECURRENT:
        steps = tensors[0].numel() // tensors[0].shape[-1]
        return steps * sum(tensor.numel() for tensor in tensors[1:] if tensor.dim() == 2)
    if op in ATTENTION:
        query, key, value = tensors[:3]
        return query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    if op == "bilinear":
        return tensors[0].shape[:-1].numel() * tensors[2].numel()
    return None
