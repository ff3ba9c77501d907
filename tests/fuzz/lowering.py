"""``python -m tests.fuzz.lowering``: small random models on the kernels of every backend that is installed here.

A model of two to five ops is quantized, lowered and run.  A kernel that is more than one integer step from the
converted graph on the same inputs is a finding, and so is a program that lowers and then fails or ends the process.
Each kind is reduced to the fewest ops, and written as a script of torch, torchao and the backend alone.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

import pt2qa
from pt2qa.errors import DeploymentError
from tests.fuzz import grammar
from tests.fuzz.__main__ import main
from tests.fuzz.analyses import Outcome, Wrong, _noted
from tests.fuzz.grammar import NESTED, OPS, Gene, Genome, batch_of, random_genome, write
from tests.sweep import quantizer as everything

BACKENDS: Final = {"xnnpack": "executorch", "x86": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino"}
"""The backends, and the package without which none of their programs runs."""

QUANTIZERS: Final = {
    "xnnpack": ("xnnpack", "onnxruntime", "openvino"),
    "xnnpack:per tensor": ("xnnpack",),
    "xnnpack:dynamic": ("xnnpack",),
    "everything": ("xnnpack", "openvino"),
    "x86": ("x86", "onnxruntime", "openvino"),
    "x86:dynamic": ("x86",),
}
"""Quantizers, and the backends that get their graphs; ``everything`` rounds the inputs and the output of each op."""

DATA: Final = ("normal", "normal", "wide", "zero", "constant", "repeated", "strided", "integers")
FAILS: Final = ("fails", "failed to run", "does not load", "ended", "cannot be loaded")
"""How a refusal reads that is about a program which was lowered."""

QUANTIZER: Final = {
    "xnnpack": """\
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)

quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config({options}))
""",
    "x86": """\
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config({options}))
""",
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "xnnpack": {},
    "xnnpack:per tensor": {"per_channel": False},
    "xnnpack:dynamic": {"mode": "dynamic"},
    "x86": {},
    "x86:dynamic": {"mode": "dynamic"},
}
"""Of pt2qa's quantizers."""
OWN_OPTIONS: Final = {
    "xnnpack": "is_per_channel=True",
    "xnnpack:per tensor": "is_per_channel=False",
    "xnnpack:dynamic": "is_per_channel=True, is_dynamic=True",
    "x86": "",
    "x86:dynamic": "is_dynamic=True",
}
"""Of those that they stand for."""
COMPARED: Final = """

def flat(value):
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]



{data}

def batch_of(kind, number):
    generator = torch.Generator().manual_seed({seed} * 100 + number)
    return tuple(_input(shape, kind, generator) for shape in {inputs})


torch.manual_seed({seed})
model = Net().eval()
calibration = [batch_of("normal", 0), batch_of("normal", 1)]
batch = batch_of("{kind}", 10)
prepared = prepare_pt2e(torch.export.export(model, batch, strict=False).module(), quantizer)
for each in calibration:
    prepared(*each)
converted = convert_pt2e(prepared)
expected = flat(converted(*batch))
for name, found in (("float", model(*batch)), ("deployed", deployed(converted, batch))):
    for number, (one, other) in enumerate(zip(expected, flat(found))):
        noise = (one.double() - other.double()).square().sum()
        print(f"output {{number}}: {{name}} and converted are", end=" ")
        print(f"{{10 * (one.double().square().sum() / noise).log10():.1f}} dB apart" if noise else "equal")
"""


def drawn(seed: int) -> Genome:
    """A genome of two to five ops that backends take; the same seed gives the same one."""
    chance = random.Random(seed)
    genome = random_genome(seed, ops=5)
    genes = {number: _lowered(gene, chance) for number, gene in genome.genes.items()}
    quantizer = chance.choice([*QUANTIZERS, "xnnpack", "x86"])
    batches = tuple(chance.choice(DATA) for _ in range(2))
    return replace(genome, genes=genes, quantizer=quantizer, batches=batches, nested_outputs=False)


def _lowered(gene: Gene, chance: random.Random) -> Gene:
    names = [name for name in OPS if name not in (*NESTED, "complex", "double", "gru")]
    return gene if gene.op in names else replace(gene, op=chance.choice(names))


def backends() -> list[str]:
    return [name for name, package in BACKENDS.items() if find_spec(package) is not None]


def analyse(genome: Genome, only: Sequence[str] = ()) -> Outcome:
    """Quantizes the model once, and runs it on every backend that takes its quantizer."""
    outcome = Outcome({}, {}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = None
        with _noted(outcome, "quantize"):
            pair = quantized(genome)
        for backend in [name for name in backends() if pair is not None and name in QUANTIZERS[genome.quantizer]]:
            if not only or backend in only:
                with _noted(outcome, backend):
                    compare(pair, genome, backend, outcome)
    return outcome


def quantized(genome: Genome) -> pt2qa.QuantizedPair:
    written = write(genome)
    capture = pt2qa.capture(written.model, written.example)
    quantizer: Any = everything.Everything()
    if genome.quantizer != "everything":
        quantizer = pt2qa.quantizer(genome.quantizer.partition(":")[0], **OPTIONS[genome.quantizer])
    calibration = [batch_of(genome, "normal", number) for number in range(2)]
    pair = pt2qa.quantize(capture, quantizer, calibration, progress=False)
    # Scales of each row, where the converted graph has one for the batch, are by design.
    return pair.as_deployed() if genome.quantizer == "xnnpack:dynamic" else pair


def compare(pair: Any, genome: Genome, backend: str, outcome: Outcome) -> None:
    """Every kernel must be within a step of the converted graph, and a program that lowers must run."""
    batches = [batch_of(genome, kind, 10 + number) for number, kind in enumerate(genome.batches)]
    try:
        report = pt2qa.compare_deployed(pair, batches, backend=backend, progress=False)
    except DeploymentError as error:
        if any(text in str(error) for text in FAILS):
            raise Wrong(f"a program that does not run: {error}") from error
        raise
    outcome.counts[f"{backend}: values"] = outcome.counts.get(f"{backend}: values", 0) + len(report.rows)
    outcome.counts[f"{backend}: models"] = 1
    if report.suspects:
        worst = report.suspects[0]
        cause = re.sub(r"with the scale of .*|\d[\d.e+-]*", "#", worst.cause) or "no cause was found"
        raise Wrong(f"{worst.op} of {worst.dtype}, {genome.quantizer}: {cause}\n{report}")


def script(genome: Genome, stage: str, line: str, trace: str) -> str:
    """A script that shows the finding without pt2qa, where the backend is one of executorch's or torch's own."""
    source = write(genome).source
    elsewhere = f"# {stage}: run tests.fuzz.lowering.analyse({genome!r}, ['{stage}'])\n"
    run = getattr(pt2qa.plugins.backends()[stage], "script", elsewhere)
    name = genome.quantizer.partition(":")[0]
    if genome.quantizer == "everything":
        quantizer = inspect.getsource(everything).partition("from __future__ import annotations\n")[2]
        quantizer += "\n\nquantizer = Everything()\n"
    else:
        quantizer = QUANTIZER[name].format(options=OWN_OPTIONS[genome.quantizer])
    data = inspect.getsource(grammar._input).replace("Tensor", "torch.Tensor")
    compared = COMPARED.format(seed=genome.seed, inputs=genome.inputs, kind=genome.batches[0], data=data)
    return "\n".join(
        [
            f'"""{stage}: {line}"""',
            "",
            source,
            "from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e",
            quantizer,
            run + compared,
            *(f"# {each}".rstrip() for each in trace.splitlines()),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main("fuzz.lowering", __doc__, analyse=analyse, draw=drawn, script=script))
