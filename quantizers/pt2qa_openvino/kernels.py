"""What OpenVINO makes of a model: which kernels it runs, and which of them read integers."""

from __future__ import annotations

import platform
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import torch

from pt2qa.errors import DeploymentError
from pt2qa.plugins import onednn_has_vnni

if TYPE_CHECKING:
    from pt2qa_openvino.backend import IR, OpenVINOBackend, OpenVINOProgram

INTEGERS = ("i8", "u8")
NOT_KERNELS = ("Const", "Input", "Output", "Parameter", "Result", "Reorder")
"""The layer types of a runtime model that compute nothing."""

SATURATES = "without VNNI, sums of two products of uint8 and int8 saturate at 16 bits; weights within -64..63 avoid it"

_ROUNDING = re.compile(r".*FakeQuantize(_\d+)?|Convert_\d+|")
_SET = re.compile(r"sse42|avx\w*?(?=_|$)(_amx|_vnni|_core|_fp16|_bf16)*|neon|sve\w*|acl|mlas")


def saturates() -> bool:
    """Whether OpenVINO adds two products of int8 in 16 bits, as on x86 without VNNI; int8 inputs get 128 more."""
    return platform.machine().lower() in ("x86_64", "amd64") and not onednn_has_vnni()


def core() -> openvino.Core:
    """OpenVINO's entry; it is made once."""
    if not _CORES:
        _CORES.append(openvino.Core())
    return _CORES[0]


_CORES: list[openvino.Core] = []


def compiled(backend: OpenVINOBackend, model: IR) -> openvino.CompiledModel:
    """A model on the CPU.

    Raises:
        DeploymentError: OpenVINO does not read or compile it.
    """
    config: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,  # it would pin the caller's thread as well
    }
    if backend.precision != "auto":
        config["INFERENCE_PRECISION_HINT"] = backend.precision
    if not backend.dynamic_quantization:
        config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    if not backend.int8_kernels:
        config["LP_TRANSFORMS_MODE"] = False
    try:
        return core().compile_model(loaded(model), "CPU", config)
    except Exception as error:  # openvino's have no base of their own
        raise DeploymentError(f"OpenVINO could not load the model: {reason_of(error)}") from error


def loaded(model: IR) -> openvino.Model:
    """A model in memory, which may be edited."""
    weights = np.frombuffer(model.weights, np.uint8) if model.weights else np.zeros(0, np.uint8)
    return core().read_model(model.graph, openvino.Tensor(weights))


def reason_of(error: BaseException) -> str:
    """The lines of a message that say what went wrong, without those that say where in OpenVINO's sources."""
    where = ("Exception from", "Check '", "FrontEnd API failed", "Summary", "While validating")
    lines = [line.strip() for line in str(error).splitlines()]
    summary = [line for line in lines if line.startswith(("-- Conversion is failed", "-- No conversion rule"))]
    said = summary or [line for line in lines if line and not line.startswith(where)] or lines
    return said[0].removeprefix("-- ") if said else type(error).__name__


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a compiled model.

    Attributes:
        layers: by the name of each op of the model that a kernel computes, whether that kernel reads integers.
        facts: what a reader must know about what runs.
        lines: each kernel with what it reads and writes.
    """

    layers: dict[str, bool]
    facts: tuple[str, ...]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, program: OpenVINOProgram) -> Kernels:
        """Compiles a program, and reads what OpenVINO then runs.

        Raises:
            DeploymentError: it cannot be compiled.
        """
        model = program.compiled(program.model)
        kernels = [each for each in map(_Kernel.of, model.get_runtime_model().get_ordered_ops()) if each.computes]
        counts = {
            kind: Counter(each.layer for each in kernels if each.on_integers is kind and not each.rounds)
            for kind in (True, False)
        }
        sets = dict.fromkeys(each.instruction_set for each in kernels if each.on_integers)
        isa = ", ".join(filter(None, sets))
        backend = program.backend
        group = model.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")
        dynamic = (
            "no dynamic quantization without VNNI" if saturates() else f"dynamic quantization in groups of {group}"
        )
        options = [
            f", {dynamic}" if backend.dynamic_quantization else "",
            "" if backend.int8_kernels else ", int8 kernels off",
        ]
        precision = model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        facts = (
            f"OpenVINO {openvino.__version__.partition('-')[0]} on {torch.backends.cpu.get_cpu_capability()}, "
            f"precision {precision}{''.join(options)}",
            f"kernels on integers: {listed(counts[True])}{f', with {isa}' if isa else ''}; in float: "
            f"{listed(counts[False])}",
            *([SATURATES] if counts[True] and saturates() else []),
        )
        layers = {name: each.on_integers for each in kernels for name in each.names}
        return cls(layers, facts, tuple(each.line for each in kernels))


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A node of a runtime model.

    Attributes:
        layer: its type, such as ``Convolution``.
        primitive: which implementation runs, such as ``brgconv_avx512_amx_I8``.
        names: of the ops that it computes.
        reads: the types of its inputs that are not constants.
        writes: the types of its outputs.
    """

    layer: str
    primitive: str
    names: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @classmethod
    def of(cls, node: Any) -> _Kernel:
        known = node.get_rt_info()
        layer, primitive, names = (_text(known[key]) for key in ("layerType", "primitiveType", "originalLayersNames"))
        reads = [each.get_source_output() for each in node.inputs()]
        return cls(
            layer,
            primitive,
            tuple(name for name in names.split(",") if name) or (node.get_friendly_name(),),
            tuple(_type(each) for each in reads if _text(each.get_node().get_rt_info()["layerType"]) != "Const"),
            tuple(map(_type, node.outputs())),
        )

    @property
    def computes(self) -> bool:
        """Whether it is run for each batch, and does more than copy."""
        return self.layer not in NOT_KERNELS and bool(self.reads)

    @property
    def rounds(self) -> bool:
        """Whether it only quantizes or dequantizes."""
        return all(_ROUNDING.fullmatch(name) for name in self.names)

    @property
    def on_integers(self) -> bool:
        return any(each in INTEGERS for each in self.reads)

    @property
    def instruction_set(self) -> str:
        found = _SET.search(self.primitive)
        return "" if found is None else found[0]

    @property
    def line(self) -> str:
        reads, writes = ", ".join(self.reads), ", ".join(self.writes)
        return f"{self.layer} {self.primitive} {reads} -> {writes}: {', '.join(self.names)}"


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _type(value: Any) -> str:
    return str(value.get_element_type().get_type_name())


def listed(counts: Counter[str]) -> str:
    """Names, each with how often it occurs."""
    return ", ".join(f"{layer} ({count})" for layer, count in counts.items()) or "none"
