"""What a quantizer plug-in is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch.fx import GraphModule


@runtime_checkable
class QuantizerPlugin(Protocol):
    """A configured quantizer: an instance of a frozen dataclass whose fields are its options.

    A package offers a plug-in through an entry point in the group ``pt2qa.quantizers`` that names an *instance with
    default options*; :func:`pt2qa.plugins.quantizer` replaces fields in it. ``name`` equals the entry point's name. A
    field can have a help text: ``field(metadata={"help": "..."})``.

    The following members, for override plans and the structure check, are optional
    (:mod:`pt2qa.plugins.abilities` has the defaults):

    - ``levels: ClassVar[tuple[str, ...]]``: the kinds of edit worth trying op by op; by default
      ``("float", "observer")``.
    - ``fusable: ClassVar[tuple[tuple[str, str], ...]]``: pairs of op types, such as ``("conv2d", "hardtanh")``, that
      the backend runs as one kernel although the quantizer rounds between them. Others are refused.
    - ``dynamic_axes(node) -> tuple[int, ...]``: the axes along which the values of a dynamic input share a scale in the
      kernel of the op that reads it, where that is not the whole tensor, counted from the last: ``(-1,)`` for a scale
      for each row. :meth:`pt2qa.QuantizedPair.as_deployed` computes so.
    - ``int32_bias: ClassVar[bool]``: whether kernels with static scales add biases to 32-bit integer sums, which a bias
      can exceed, and not to float ones.
    - ``takes() -> tuple[str, ...]``: the op types that it quantizes with these options, for the error message if a
      model has none.
    - ``unsupported_reason(kind, node) -> str``: why an op cannot take an edit (``dynamic``, ``int16``, ``observer``);
      empty if it can. ``node`` is a node of the graph that is being annotated.
    - ``quantizer_code(plan, graph, *, qat=False) -> str``: Python source that sets ``quantizer`` to one with a plan's
      edits, for an export flow without pt2qa; if it reads that name first, it is the one that the user configured.
    - ``rules() -> tuple[Rule, ...]``: additional rules of the structure check for this backend.
    - ``spec: ClassVar[BackendSpec]``: what the backend's kernels take, as data, for the check and the conformance kit;
      see :class:`pt2qa.plugins.BackendSpec`.
    - ``quantizer_classes: ClassVar[tuple[str, ...]]``: paths of the torchao quantizers that annotate for this backend.
      An object of one, or of a subclass, that is given in place of the plug-in is held against its ``spec``.
    - ``backend: ClassVar[Backend]``: lowers converted graphs and runs them, for :func:`pt2qa.compare_deployed`; see
      :class:`pt2qa.plugins.Backend`.

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
        """Short name, as users type it."""

    @property
    def summary(self) -> str:
        """One line: what it quantizes, and for which hardware."""

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """A torchao ``Quantizer`` for one graph.

        Args:
            graph: the captured float graph, before ``prepare``; only to check names, never to be changed.
            qat: whether the quantizer is for ``prepare_qat_pt2e``.

        Raises:
            PluginError: the backend does not support the options, or they name something that the graph does not have.
        """
