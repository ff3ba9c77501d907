"""Any torchao quantizer object as a plug-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pt2qa.errors import PluginError
from pt2qa.plugins.backend_spec import BackendSpec

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True)
class GenericPlugin:
    """A configured torchao ``Quantizer`` object as a plug-in; its name is the name of its class.

    Args:
        quantizer: an instance of a subclass of ``torchao.quantization.pt2e.quantizer.Quantizer``.

    Raises:
        PluginError: it is a class, or derives from another package's ``Quantizer``. ``prepare_pt2e`` and the quantizer
            must come from the same package, or ``convert_pt2e`` does not see the observers.

    >>> from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
    >>> GenericPlugin(X86InductorQuantizer()).name
    'X86InductorQuantizer'
    """

    quantizer: Any

    def __post_init__(self) -> None:
        from torchao.quantization.pt2e.quantizer import Quantizer

        if isinstance(self.quantizer, Quantizer):
            return
        if isinstance(self.quantizer, type):
            raise PluginError(
                f"got the class {_path(self.quantizer)}, expected an instance of it: "
                f"write {self.quantizer.__qualname__}() and configure it"
            )
        foreign = [base for base in type(self.quantizer).__mro__ if base.__name__ == "Quantizer"]
        if foreign or hasattr(self.quantizer, "annotate"):
            base = f"derives from {_path(foreign[0])}" if foreign else "does not derive from it"
            raise PluginError(
                f"got a {_path(type(self.quantizer))}, expected a {_path(Quantizer)}: it {base}. pt2qa prepares with "
                "torchao, and a quantizer of another package would silently leave the model in float; "
                "use this backend's quantizer for torchao"
            )
        raise PluginError(
            f"got {self.quantizer!r} ({_path(type(self.quantizer))}), expected the name of a quantizer plug-in, a "
            "plug-in, or a torchao Quantizer object"
        )

    @property
    def name(self) -> str:
        """The quantizer's class name."""
        return type(self.quantizer).__name__

    @property
    def spec(self) -> BackendSpec | None:
        """What the backend takes, if the quantizer has an attribute ``spec`` that states it."""
        spec = getattr(self.quantizer, "spec", None)
        return spec if isinstance(spec, BackendSpec) else None

    @property
    def summary(self) -> str:
        """Where the quantizer's class comes from."""
        return f"{_path(type(self.quantizer))}, as it was configured"

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """The quantizer itself."""
        set_up_for_qat = getattr(getattr(self.quantizer, "global_config", None), "is_qat", None)
        if isinstance(set_up_for_qat, bool) and set_up_for_qat != qat:
            raise PluginError(
                f"{self.name} was configured with is_qat={set_up_for_qat}, but qat={qat} was requested: "
                f"configure it with is_qat={qat}, or quantize with qat={set_up_for_qat}"
            )
        return self.quantizer


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
