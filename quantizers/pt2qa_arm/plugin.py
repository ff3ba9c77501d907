"""The options of Arm's quantizer.  ExecuTorch is imported when a quantizer is built, never before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pt2qa.errors import PluginError
from pt2qa.plugins import check_options
from pt2qa_arm.backend import PLAIN, WIDE, TOSABackend, check_specification

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True, kw_only=True)
class TOSA:
    """ExecuTorch's ``TOSAQuantizer``: int8 weights (symmetric, -127..127), affine int8 activations, int32 biases.

    Args:
        activations: ``"int8"``, or ``"int16"``: symmetric, -32767..32767; the specification must have ``int16``.
        per_channel: one weight scale for each output channel, else one for the tensor.
        specification: the profile of TOSA and its extensions. Ethos-U55 and U65 have
            ``"TOSA-1.0+INT+int16+int4+u55"``, Ethos-U85 ``"TOSA-1.0+INT+int16+int4+cf"``.

    Raises:
        PluginError: an option's value is not one of those above, or the specification lacks ``int16``.

    >>> TOSA(per_channel=False).name
    'tosa'
    """

    name: ClassVar[str] = "tosa"
    summary: ClassVar[str] = "int8 for Arm's Ethos-U and VGF through TOSA, by ExecuTorch's own quantizer"

    activations: Literal["int8", "int16"] = field(default="int8", metadata={"help": "integers of activations"})
    per_channel: bool = field(default=True, metadata={"help": "one weight scale per output channel, not per tensor"})
    specification: str = field(default=PLAIN, metadata={"help": "profile of TOSA and its extensions"})

    def __post_init__(self) -> None:
        check_options(self)
        check_specification("quantizer 'tosa'", self.specification)
        if self.activations == "int16" and "int16" not in self.specification.split("+"):
            raise PluginError(
                f"quantizer 'tosa': activations=int16 needs a specification with int16, got {self.specification!r}: "
                f"use specification={WIDE}"
            )

    @property
    def backend(self) -> TOSABackend:
        """What lowers its graphs: for the same specification."""
        return TOSABackend(specification=self.specification)

    def missing(self) -> str:
        """Why it cannot quantize here; empty if it can."""
        return self.backend.missing()

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """The configured quantizer; see :class:`pt2qa.plugins.QuantizerPlugin`.

        Raises:
            PluginError: a package that ExecuTorch's quantizer needs is not installed.
        """
        if missing := self.missing():
            raise PluginError(f"quantizer 'tosa': {missing}")
        from executorch.backends.arm import quantizer
        from executorch.backends.arm.tosa import TosaSpecification

        config = {
            "int8": quantizer.get_symmetric_quantization_config,
            "int16": quantizer.get_symmetric_a16w8_quantization_config,
        }[self.activations]
        specification = TosaSpecification.create_from_string(self.specification)
        return quantizer.TOSAQuantizer(specification).set_global(config(is_per_channel=self.per_channel, is_qat=qat))


PLUGIN = TOSA()
