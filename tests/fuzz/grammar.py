"""Random models: a list of genes, and the source of the module that they make.

A gene is an op on the values of earlier genes.  It is written and run at once, on the values of an example; one that
does not fit its operands is left out, and who reads it reads its first operand.  So every list of genes is a model, a
part of one too, which is what makes a failing one small.
"""

from __future__ import annotations

import linecache
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 4096
"""Most elements of a value."""

OPS: dict[str, tuple[str, str]] = {
    # name: what __init__ makes, what forward computes.  {a}, {b}: operands; {r}: the result; {n}: the gene's number;
    # {s}: its size; {last}, {ch}: sizes of the last axis and of axis 1 of {a}; {ax}: one of its axes.
    # Products.
    "linear": ("self.m{n} = nn.Linear({last}, {s})", "{r} = self.m{n}({a})"),
    "linear_no_bias": ("self.m{n} = nn.Linear({last}, {s}, bias=False)", "{r} = self.m{n}({a})"),
    "linear_relu": ("self.m{n} = nn.Linear({last}, {s})", "{r} = self.m{n}({a}).relu()"),
    "linear_zero_channel": ("self.m{n} = zeroed(nn.Linear({last}, {s}))", "{r} = self.m{n}({a})"),
    "shared_linear": ("self.shared_linear{last} = nn.Linear({last}, {last})", "{r} = self.shared_linear{last}({a})"),
    "tied_linear": (
        "self.shared_linear{last} = nn.Linear({last}, {last})",
        "{r} = F.linear({a}, self.shared_linear{last}.weight.t())",
    ),
    "embedding": ("self.words = nn.Embedding(11, 6)", "{r} = self.words({a}.long().abs() % 11)"),
    "tied_embedding": ("self.words = nn.Embedding(11, 6)", "{r} = F.linear({a}, self.words.weight)"),
    "positions": ("self.places = nn.Embedding(31, 6)", "{r} = self.places(torch.arange({s}))"),
    "conv2d": ("self.m{n} = nn.Conv2d({ch}, {s}, 3, padding=1)", "{r} = self.m{n}({a})"),
    "conv2d_stride": ("self.m{n} = nn.Conv2d({ch}, {s}, 2, stride=2, bias=False)", "{r} = self.m{n}({a})"),
    "conv2d_depthwise": ("self.m{n} = nn.Conv2d({ch}, {ch}, 3, padding=1, groups={ch})", "{r} = self.m{n}({a})"),
    "conv2d_same": ("self.m{n} = nn.Conv2d({ch}, {s}, 3, padding='same')", "{r} = self.m{n}({a})"),
    "conv_bn": (
        "self.m{n} = nn.Sequential(nn.Conv2d({ch}, {s}, 1), normed(nn.BatchNorm2d({s})))",
        "{r} = self.m{n}({a})",
    ),
    "conv_bn_relu": (
        "self.m{n} = nn.Sequential(nn.Conv2d({ch}, {s}, 1), normed(nn.BatchNorm2d({s})), nn.ReLU(inplace=True))",
        "{r} = self.m{n}({a})",
    ),
    "shared_conv": ("self.shared_conv{ch} = nn.Conv2d({ch}, {ch}, 1)", "{r} = self.shared_conv{ch}({a})"),
    "conv1d": ("self.m{n} = nn.Conv1d({ch}, {s}, 3, padding=1)", "{r} = self.m{n}({a})"),
    "conv_transpose2d": ("self.m{n} = nn.ConvTranspose2d({ch}, {s}, 2, stride=2)", "{r} = self.m{n}({a})"),
    "matmul": ("", "{r} = {a} @ {b}.transpose(-1, -2)"),
    "matmul_self": ("", "{r} = {a}.transpose(-1, -2) @ {a}"),
    "einsum": ("", "{r} = torch.einsum('...i,...j->...ij', {a}, {b})"),
    "attention": ("", "{r} = F.scaled_dot_product_attention({a}, {b}, {b})"),
    "masked_softmax": (
        "",
        "{r} = ({a} @ {a}.transpose(-1, -2)).masked_fill("
        "torch.ones({before_last}, {before_last}).tril() == 0, float('-inf')).softmax(-1)",
    ),
    # Norms.
    "batch_norm": ("self.m{n} = normed(nn.BatchNorm2d({ch}))", "{r} = self.m{n}({a})"),
    "layer_norm": ("self.m{n} = nn.LayerNorm({last})", "{r} = self.m{n}({a})"),
    "group_norm": ("self.m{n} = nn.GroupNorm(1, {ch})", "{r} = self.m{n}({a})"),
    "rms_norm": (
        "self.p{n} = nn.Parameter(torch.rand({last}) + 0.5)",
        "{r} = {a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-6) * self.p{n}",
    ),
    "normalize": ("", "{r} = {a} / ({a}.norm(dim=-1, keepdim=True) + 1e-12)"),
    # Pointwise.
    "relu": ("", "{r} = F.relu({a})"),
    "relu_module": ("self.relu = nn.ReLU()", "{r} = self.relu({a})"),
    "hardtanh": ("", "{r} = F.hardtanh({a})"),
    "relu6": ("", "{r} = F.relu6({a})"),
    "leaky_relu": ("", "{r} = F.leaky_relu({a})"),
    "sigmoid": ("", "{r} = {a}.sigmoid()"),
    "tanh": ("", "{r} = {a}.tanh()"),
    "gelu": ("", "{r} = F.gelu({a})"),
    "silu": ("", "{r} = F.silu({a})"),
    "hardswish": ("", "{r} = F.hardswish({a})"),
    "hardsigmoid": ("", "{r} = F.hardsigmoid({a})"),
    "prelu": ("self.m{n} = nn.PReLU()", "{r} = self.m{n}({a})"),
    "softmax": ("", "{r} = {a}.softmax(-1)"),
    "log_softmax": ("", "{r} = {a}.log_softmax(-1)"),
    "exp": ("", "{r} = {a}.clamp(-5, 3).exp()"),
    "abs": ("", "{r} = {a}.abs()"),
    "neg": ("", "{r} = -{a}"),
    "sqrt": ("", "{r} = ({a}.abs() + 1e-5).sqrt()"),
    "sign": ("", "{r} = {a}.sign()"),
    "round": ("", "{r} = ({a} * 3).round()"),
    "sin": ("", "{r} = {a}.sin()"),
    "clamp": ("", "{r} = {a}.clamp(-0.7, {s})"),
    "square": ("", "{r} = {a}.pow(2)"),
    "dropout": ("self.m{n} = nn.Dropout(0.5)", "{r} = self.m{n}({a})"),
    "identity": ("self.m{n} = nn.Identity()", "{r} = self.m{n}({a})"),
    # Two operands.
    "add": ("", "{r} = {a} + {b}"),
    "add_relu": ("", "{r} = F.relu({a} + {b})"),
    "add_self": ("", "{r} = {a} + {a}"),
    "add_alpha": ("", "{r} = torch.add({a}, {b}, alpha={s})"),
    "sub": ("", "{r} = {a} - {b}"),
    "mul": ("", "{r} = {a} * {b}"),
    "div": ("", "{r} = {a} / ({b}.abs() + 0.5)"),
    "maximum": ("", "{r} = torch.maximum({a}, {b})"),
    "where": ("", "{r} = torch.where({a} > {b}, {a}, {b} * 0.5)"),
    "add_scalar": ("", "{r} = {a} + {s}"),
    "add_small": ("", "{r} = {a} + 1e-12"),
    "mul_scalar": ("", "{r} = {a} * 0.37"),
    "mul_large": ("", "{r} = {a} * 1e4"),
    "mul_small": ("", "{r} = {a} * 1e-7"),
    "rsub": ("", "{r} = 1 - {a}"),
    "mul_parameter": ("self.p{n} = nn.Parameter(torch.rand({last}) + 0.1)", "{r} = {a} * self.p{n}"),
    "add_parameter": ("self.p{n} = nn.Parameter(torch.randn({last}))", "{r} = self.p{n} + {a}"),
    "mul_buffer": ("self.register_buffer('p{n}', torch.randn({last}))", "{r} = {a} * self.p{n}"),
    "literal": ("", "{r} = {a} + torch.tensor([0.25] * {last})"),
    "zero_dim_parameter": ("self.p{n} = nn.Parameter(torch.tensor(0.3))", "{r} = {a} * self.p{n}"),
    # Shapes and places.
    "cat": ("", "{r} = torch.cat([{a}, {b}], -1)"),
    "cat_channels": ("", "{r} = torch.cat([{a}, {b}], 1)"),
    "cat_self": ("", "{r} = torch.cat([{a}, {a}], {ax})"),
    "stack": ("", "{r} = torch.stack([{a}, {b}], 1)"),
    "chunk": ("", "{r}, _ = {a}.chunk(2, -1)"),
    "chunk_add": ("", "{r} = {a}[..., :1] + sum(part.sum(-1, keepdim=True) for part in {a}.split(2, -1))"),
    "unbind": ("", "{r} = {a}.unbind({ax})[-1]"),
    "slice": ("", "{r} = {a}[..., :{s}]"),
    "slice_odd": ("", "{r} = {a}[..., ::2]"),
    "empty": ("", "{r} = {a}[..., :0]"),
    "cat_empty": ("", "{r} = torch.cat([{a}, {a}[..., :0]], -1)"),
    "select": ("", "{r} = {a}[:, 0]"),
    "expand": ("", "{r} = {a}[:, :1].expand_as({a})"),
    "expand_new": ("", "{r} = {a}.unsqueeze(1).expand(-1, {s}, *{a}.shape[1:])"),
    "transpose": ("", "{r} = {a}.transpose(-1, -2)"),
    "permute": ("", "{r} = {a}.permute(0, *range({dim} - 1, 0, -1))"),
    "flatten": ("", "{r} = {a}.flatten(1)"),
    "flatten_all": ("", "{r} = {a}.reshape(-1)"),
    "reshape": ("", "{r} = {a}.reshape({a}.shape[0], -1, {a}.shape[1])"),
    "unsqueeze": ("", "{r} = {a}.unsqueeze(-1)"),
    "squeeze": ("", "{r} = {a}.squeeze(-1)"),
    "pad": ("", "{r} = F.pad({a}, (1, 2))"),
    "roll": ("", "{r} = {a}.roll(1, {ax})"),
    "flip": ("", "{r} = {a}.flip(-1)"),
    "repeat_interleave": ("", "{r} = {a}.repeat_interleave(2, -1)"),
    "upsample": ("", "{r} = F.interpolate({a}, scale_factor=2)"),
    "upsample_linear": ("", "{r} = F.interpolate({a}, scale_factor=2, mode='bilinear')"),
    "index_select": ("", "{r} = {a}.index_select(-1, torch.tensor([0, {last} - 1, 0]))"),
    "gather": ("", "{r} = {a}.gather(-1, {a}.argsort(-1))"),
    "sort": ("", "{r} = {a}.sort(-1).values"),
    "topk": ("", "{r} = {a}.topk(min({s}, {last}), -1)[0]"),
    "clone": ("", "{r} = {a}.clone()"),
    "contiguous": ("", "{r} = {a}.transpose(-1, -2).contiguous()"),
    "detach": ("", "{r} = {a}.detach()"),
    # Reductions.
    "mean_all": ("", "{r} = {a}.mean()"),
    "sum_all": ("", "{r} = {a}.sum()"),
    "mean": ("", "{r} = {a}.mean(-1)"),
    "mean_keep": ("", "{r} = {a}.mean({ax}, keepdim=True)"),
    "amax": ("", "{r} = {a}.amax(-1, keepdim=True)"),
    "max_indices": ("", "{r} = {a}.max(-1).indices"),
    "argmax": ("", "{r} = {a}.argmax(-1)"),
    "cumsum": ("", "{r} = {a}.cumsum(-1)"),
    "var": ("", "{r} = {a}.var(-1, unbiased=False)"),
    "max_pool": ("", "{r} = F.max_pool2d({a}, 3, 1, 1)"),
    "avg_pool": ("", "{r} = F.avg_pool2d({a}, 2)"),
    "adaptive_pool": ("self.m{n} = nn.AdaptiveAvgPool2d(1)", "{r} = self.m{n}({a})"),
    # In place.
    "relu_": ("", "{r} = F.relu_({a})"),
    "hardtanh_": ("", "{r} = F.hardtanh_({a} * 1.5)"),
    "add_": ("", "{r} = ({a} * 0.5).add_({b})"),
    "add_old_": ("", "{r} = {a}.add_({b})"),
    "mul_old_": ("", "{r} = {a}.mul_(0.9)"),
    "slice_add_": ("", "{r} = {a}.sigmoid(); {r}[:, :1].add_(1)"),
    "slice_set": ("", "{r} = {a}.tanh(); {r}[..., 0] = 0.25"),
    "slice_copy_": ("", "{r} = torch.zeros_like({a}); {r}[..., 1:].copy_({a}[..., 1:])"),
    "empty_like": ("", "{r} = torch.empty_like({a}).fill_(0.5) + {a}"),
    "masked_fill_": ("", "{r} = ({a} + 0.5).masked_fill_({a} < 0, 0.125)"),
    "index_put": ("", "{r} = {a} * 1; {r}[:, torch.tensor([0])] = 0.5"),
    # Dtypes.
    "half": ("", "{r} = {a}.half().float()"),
    "bfloat16": ("", "{r} = ({a}.bfloat16() * 2).float()"),
    "double": ("", "{r} = ({a}.double() + 1).float()"),
    "half_value": ("", "{r} = {a}.half()"),
    "long": ("", "{r} = ({a} * 4).long()"),
    "float": ("", "{r} = {a}.float()"),
    "bool": ("", "{r} = {a} > 0"),
    "bool_mul": ("", "{r} = {a} * ({b} > 0)"),
    "int_add": ("", "{r} = {a}.int() + 3"),
    "complex": ("", "{r} = torch.fft.rfft({a}).abs()"),
    # Nested graphs and regions.
    "cond": (
        "self.m{n} = nn.Linear({last}, {last})",
        "{r} = torch.cond({a}.sum() > 0, lambda t: self.m{n}(t).relu(), lambda t: self.m{n}(t) - 1, ({a},))",
    ),
    "while_loop": (
        "self.m{n} = nn.Linear({last}, {last})",
        "{r} = while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, self.m{n}(t).tanh()), (torch.tensor(0), {a}))[1]",
    ),
    "scan": (
        "self.m{n} = nn.Linear({last}, {last})",
        "{r} = scan(lambda c, t: ((c + self.m{n}(t)).tanh(), c * 0.5), torch.zeros_like({a}[0]), {a})[1]",
    ),
    "map": ("self.m{n} = nn.Linear({last}, {s})", "{r} = hop_map(lambda t: self.m{n}(t).relu(), {a})"),
    "no_grad": ("self.m{n} = nn.Linear({last}, {s})", "with torch.no_grad(): {r} = self.m{n}({a})"),
    "gru": ("self.m{n} = nn.GRU({last}, {s}, batch_first=True)", "{r} = self.m{n}({a})[0]"),
}
NESTED = ("cond", "while_loop", "scan", "map")
OFTEN = ("linear", "linear_relu", "conv2d", "conv_bn", "conv_bn_relu", "shared_linear", "add", "cat", "mul", "relu")
FIRST = {2: ("linear", "linear_relu"), 3: ("linear", "conv1d"), 4: ("conv2d", "conv_bn", "conv_bn_relu", "linear")}
"""What reads the first input, by its rank: something that every quantizer takes."""

SHAPES = (
    (1, 7),
    (2, 5),
    (3, 1),
    (2, 3, 5),
    (1, 4, 3),
    (2, 3, 6, 5),
    (2, 3, 5, 5),
    (1, 1, 4, 4),
    (3, 2, 1, 7),
    (4,),
    (),
)
DATA = (
    *("normal",) * 8,
    *("wide", "tiny", "zero", "repeated", "constant", "strided", "channels_last", "integers", "large", "nan", "inf"),
)
"""Kinds of batch; a model is calibrated on normal ones."""

QUANTIZERS = (
    "random",
    "random",
    "random",
    "random_ops",
    "random_ops",
    "xnnpack",
    "xnnpack:dynamic",
    "x86",
    "x86:dynamic",
)


@dataclass(frozen=True)
class Gene:
    """An op on the values of the genes ``left`` and ``right``; negative numbers are inputs, the first one -1."""

    op: str
    left: int
    right: int
    size: int


@dataclass(frozen=True)
class Genome:
    """A model, its data and how it is quantized.

    Args:
        inputs: their shapes.
        genes: by number; a part of a genome keeps its numbers.
        outputs: numbers of the genes that are returned.
        batches: kinds of the batches that are analysed.
        quantizer: ``random`` annotates edges, ``random_ops`` whole ops; else a name of an installed one.
        seed: of weights, data and annotations.
        plain: names of nodes that the random quantizer leaves alone.
        nested_outputs: whether outputs are a dict of a tuple.
    """

    inputs: tuple[tuple[int, ...], ...]
    genes: dict[int, Gene]
    outputs: tuple[int, ...]
    batches: tuple[str, ...]
    quantizer: str
    seed: int
    plain: tuple[str, ...] = ()
    nested_outputs: bool = False


def random_genome(seed: int, *, ops: int = 12) -> Genome:
    """A genome; the same seed gives the same one."""
    chance = random.Random(seed)
    inputs = tuple(chance.choice(SHAPES[:-2]) for _ in range(chance.choice((1, 1, 1, 2))))
    if chance.random() < 0.1:
        inputs = (*inputs, chance.choice(SHAPES[-2:]))
    names = [name for name in OPS if name not in NESTED]
    genes = {}
    for number in range(chance.randint(2, ops)):
        drawn = chance.random()
        op = chance.choice(OFTEN if drawn < 0.3 else NESTED if drawn < 0.33 else names)
        # Mostly what came last, so that paths become long.
        left, right = (max(number - 1 - int(chance.expovariate(0.7)), -len(inputs)) for _ in range(2))
        if number == 0:
            op, left = chance.choice(FIRST[len(inputs[0])]), -1
        genes[number] = Gene(op, left, right, chance.choice((1, 2, 3, 4, 5, 7)))
    numbers = list(genes)
    outputs = (numbers[-1], *(chance.choice(numbers) for _ in range(chance.choice((0, 0, 1, 2)))))
    return Genome(
        inputs,
        genes,
        outputs,
        tuple(chance.choice(DATA) for _ in range(chance.choice((2, 3)))),
        chance.choice(QUANTIZERS),
        seed,
        nested_outputs=chance.random() < 0.2,
    )


@dataclass
class Written:
    """The module that a genome makes: its source, and the object."""

    source: str
    model: nn.Module
    example: tuple[Tensor, ...]
    ops: list[str] = field(default_factory=list)


PRELUDE = '''\
import torch
from torch import nn
from torch.nn import functional as F
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop


def normed(norm):
    """Statistics and affine parameters that are far from the identity."""
    norm.running_mean.normal_(0, 0.3), norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias, 0, 0.2)
    return norm


def zeroed(linear):
    """A channel of zeros, and one that is far larger than the others."""
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[-1] *= 500
    return linear
'''


def write(genome: Genome) -> Written:
    """Writes the module, gene by gene, each tried on the values of an example."""
    torch.manual_seed(genome.seed)
    example = batch_of(genome, "normal", 0)
    space: dict[str, Any] = {}
    exec(PRELUDE, space)
    space["self"] = nn.Module().eval()
    values: dict[int, str] = {}
    for number, value in enumerate(example):
        space[f"x{number}"], values[-1 - number] = value.clone(), f"x{number}"
    made: dict[str, None] = {}
    computed, ops = [], []
    for number, gene in genome.genes.items():
        init, line = _lines(genome, number, gene, values, space)
        if line and _works(init if init not in made else "", line, f"v{number}", space):
            made.setdefault(init)
            computed.append(line)
            ops.append(gene.op)
            values[number] = f"v{number}"
    names = list(dict.fromkeys(_value(genome, number, values) for number in genome.outputs))
    returned = f"({', '.join(names)},)" if len(names) > 1 else names[0]
    returned = f"{{'first': {names[0]}, 'all': {returned}}}" if genome.nested_outputs else returned
    arguments = ", ".join(["self", *(f"x{number}" for number in range(len(example)))])
    parts = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    parts += [f"        {line}" for line in made if line]
    parts += ["", f"    def forward({arguments}):", *(f"        {line}" for line in computed)]
    source = "\n".join([PRELUDE, "", *parts, f"        return {returned}", ""])
    return Written(source, load(source, genome.seed), example, ops)


def load(source: str, seed: int) -> nn.Module:
    """The module of a source, with random weights."""
    name = f"<fuzz {seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(source, name, "exec"), space)
    torch.manual_seed(seed)
    model: nn.Module = space["Net"]()
    return model.eval()


def _value(genome: Genome, number: int, values: dict[int, str]) -> str:
    """The name of a value; of one that is left out that of its first operand."""
    while number not in values:
        number = genome.genes[number].left if number in genome.genes else number - 1
        if number < -len(genome.inputs):
            number = -1
    return values[number]


def _lines(genome: Genome, number: int, gene: Gene, values: dict[int, str], space: dict[str, Any]) -> tuple[str, str]:
    a, b = _value(genome, gene.left, values), _value(genome, gene.right, values)
    shape = space[a].shape if isinstance(space[a], Tensor) else ()
    known = {
        "a": a,
        "b": b,
        "r": f"v{number}",
        "n": number,
        "s": gene.size,
        "dim": len(shape),
        "last": shape[-1] if shape else 0,
        "before_last": shape[-2] if len(shape) > 1 else 0,
        "ch": shape[1] if len(shape) > 1 else 0,
        "ax": gene.size % len(shape) if shape else 0,
    }
    init, line = OPS[gene.op]
    return init.format(**known), line.format(**known)


def _works(init: str, line: str, name: str, space: dict[str, Any]) -> bool:
    """Whether a line runs and leaves a finite value of a moderate size."""
    before = {key: value.clone() for key, value in space.items() if isinstance(value, Tensor)}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exec(init, space)
            space["self"].eval()
            exec(line, space)
        value = space[name]
        return value.numel() <= LARGEST and bool((value.abs() < 1e7).all() if value.dtype != torch.bool else True)
    except Exception:  # the op does not take these operands: another model
        space.update(before)
        return False


def batch_of(genome: Genome, kind: str, number: int) -> tuple[Tensor, ...]:
    """A batch of a kind; every number another."""
    generator = torch.Generator().manual_seed(genome.seed * 100 + number)
    return tuple(_input(shape, kind, generator) for shape in genome.inputs)


def _input(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    match kind:
        case "wide":
            return x * 8
        case "tiny":
            return x * 1e-6
        case "large":
            return x * 1e4
        case "zero":
            return x * 0
        case "constant":
            return torch.full(shape, 0.3)
        case "repeated":
            return x[..., :1].repeat(*(1,) * (x.dim() - 1), shape[-1]) if x.dim() else x
        case "strided":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x
        case "channels_last":
            return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        case "integers":
            return (x * 2).round()
        case "nan" | "inf":
            x.view(-1)[0] = float(kind)
    return x


def smaller(genome: Genome) -> Iterator[Genome]:
    """Genomes with a little less, those with much less first."""
    from dataclasses import replace

    numbers = list(genome.genes)
    size = len(numbers)
    while size:
        for start in range(0, len(numbers), size):
            gone = set(numbers[start : start + size])
            yield replace(genome, genes={number: gene for number, gene in genome.genes.items() if number not in gone})
        size //= 2
    if genome.nested_outputs:
        yield replace(genome, nested_outputs=False)
    for position in range(len(genome.outputs)):
        if len(genome.outputs) > 1:
            yield replace(genome, outputs=genome.outputs[:position] + genome.outputs[position + 1 :])
    for position, kind in enumerate(genome.batches):
        if len(genome.batches) > 1:
            yield replace(genome, batches=genome.batches[:position] + genome.batches[position + 1 :])
        if kind != "normal":
            batches = (*genome.batches[:position], "normal", *genome.batches[position + 1 :])
            yield replace(genome, batches=batches)
    for number, gene in genome.genes.items():
        if gene.size > 1:
            yield replace(genome, genes={**genome.genes, number: replace(gene, size=1)})
    for position, shape in enumerate(genome.inputs):
        for axis, length in enumerate(shape):
            for less in {1, length // 2} - {0, length}:
                small = (*shape[:axis], less, *shape[axis + 1 :])
                yield replace(genome, inputs=(*genome.inputs[:position], small, *genome.inputs[position + 1 :]))
