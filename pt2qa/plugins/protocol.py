"""What a quantizer plug-in is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch.fx import GraphModule


@runtime_checkable
class QuantizerPlugin(Protocol):
    """A configured quantizer: an instance of a frozen dataclass whose fields are its options.

    A package offers one by an entry point in the group ``pt2qa.quantizers`` that names an *instance with default
    options*; :func:`pt2qa.plugins.quantizer` replaces fields in it. ``name`` equals the entry point's name. A field
    may carry its explanation as ``field(metadata={"help": "..."})``.

    What follows may be left out (:mod:`pt2qa.plugins.abilities` holds what is assumed then); it is for override plans
    and the structure check:

    - ``levels: ClassVar[tuple[str, ...]]``: the kinds of edit that are worth trying op by op, ``("float", "observer")``
      where it is missing.
    - ``fusable: ClassVar[tuple[tuple[str, str], ...]]``: pairs of op types, such as ``("conv2d", "hardtanh")``, that
      the backend runs as one kernel though the quantizer rounds between them. Others are refused.
    - ``takes() -> tuple[str, ...]``: the kinds of op that it quantizes with these options, for the error of a model in
      which it finds none.
    - ``unsupported_reason(kind, node) -> str``: why an op cannot take an edit (``dynamic``, ``int16``, ``observer``);
      empty where it can. ``node`` is one of the graph that is being annotated.
    - ``quantizer_code(plan, graph) -> str``: Python source that does a plan's edits in an export flow without pt2qa.
    - ``rules() -> tuple[Rule, ...]``: rules of the structure check that only this backend needs.

    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> @dataclass(frozen=True)
    ... class Nothing:
    ...     name: ClassVar[str] = "nothing"
    ...     summary: ClassVar[str] = "leaves every op in float"
    ...     loud: bool = False
    ...
    ...     def build(self, graph, *, qat):
    ...         raise NotImplementedError
    >>> isinstance(Nothing(), QuantizerPlugin)
    True
    """

    @property
    def name(self) -> str:
        """Short name, as the user types it."""

    @property
    def summary(self) -> str:
        """One line: what it quantizes, and for which hardware."""

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """A torchao ``Quantizer`` for one graph.

        Args:
            graph: the captured float graph, before ``prepare``; for checking names only, never to be changed.
            qat: whether ``prepare_qat_pt2e`` will be given the quantizer.

        Raises:
            PluginError: the options ask for what the backend does not have, or name what the graph does not hold.
        """
