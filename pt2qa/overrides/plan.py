"""An override plan: which ops to quantize differently, as a small JSON file.  Free of torch.

Ops have the names of pt2qa's reports (``features.0.0/conv2d``).  A name consists of module path, op and ordinal, so a
plan still fits after the model is exported again.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from pt2qa._report.atomic import write_atomic
from pt2qa._report.sums import Array
from pt2qa.errors import QuantizeError, ReportError

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer

EditKind = Literal[
    "float",
    "fuse",
    "dynamic",
    "int8",
    "int8_weight",
    "int16",
    "observer",
    "range",
    "bias",
    "shift",
    "scale",
    "smooth",
    "round",
]
KINDS: tuple[str, ...] = get_args(EditKind)
BEFORE_CALIBRATION = ("shift", "scale", "smooth")
"""Edits of parameters that are made before a quantizer sees the graph."""

OBSERVERS = {
    "minmax": "MinMaxObserver",
    "histogram": "HistogramObserver",
    "moving_average": "MovingAverageMinMaxObserver",
}
"""torchao's class by the name that edits use."""

_FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(KINDS, ()),
    "observer": ("observer",),
    "range": ("scale", "zero_point"),
    **dict.fromkeys((*BEFORE_CALIBRATION, "bias", "round"), ("values",)),
}
"""What an edit has by its kind, besides the ops."""

SCHEMA = 1
_FORMAT = "pt2qa override plan"


@dataclass(frozen=True, slots=True)
class Edit:
    """One change to a quantizer's annotations.

    Args:
        kind: ``"float"``: the ops are not quantized. ``"fuse"``: two ops are quantized as one, without rounding between
            them. ``"dynamic"``: the scale of their inputs is computed from each input, and their outputs stay in float.
            ``"int8"``: their outputs have all integers of eight bits and a scale of their own, whatever the quantizer
            annotates. ``"int8_weight"``: so do their weights, with a scale for each output channel. ``"int16"``: their
            inputs and outputs are int16. ``"observer"``: another observer determines their scales.
            ``"range"``: the scale and zero point of their outputs are fixed, and of what shares these.  ``"bias"``:
            ``values`` are added to the bias of one op, 0 without one, after calibration. ``"shift"``: ``values`` are
            subtracted from the bias of a norm and taken back in the biases of the linears that read it, and of those
            whose outputs are added to it. ``"scale"``: the output channels of ops are divided by ``values``, in their
            weights and biases, and the input channels of those that read them multiplied, in their weights.
            ``"smooth"`` is an earlier name of it. ``"round"``: the weight of one op becomes ``values``, times its
            scale.
        ops: names of ops, as reports show them; for ``"fuse"``, the first op and the one that reads it; for
            ``"range"`` and ``"int8"``, those of inputs, too; for ``"shift"``, the norm and all linears that read it,
            then those that are added; for ``"scale"``, all that write and read the channels, the first writer first.
        observer: for ``"observer"``: ``"minmax"``, ``"histogram"`` or ``"moving_average"``.
        scale: for ``"range"``: positive; it is rounded to float32, as observers have it.
        zero_point: for ``"range"``: the integer for 0.
        values: for ``"bias"``: one float32 for each output channel, as little-endian bytes in base64; for ``"shift"``:
            such a number for each channel of the norm; for ``"scale"``: such a positive number for each channel that
            can have a factor of its own, as the first writer has them; for ``"round"``: the weight as it is stored, one
            int8 for each element.

    Raises:
        QuantizeError: a field has an invalid value.

    >>> Edit("float", ("layer1.0.conv1/conv2d", "layer1.0.relu/relu"))
    Edit(kind='float', ops=('layer1.0.conv1/conv2d', 'layer1.0.relu/relu'))
    """

    kind: EditKind
    ops: tuple[str, ...]
    observer: str = ""
    scale: float = 0.0
    zero_point: int = 0
    values: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise QuantizeError(f"edit: kind: got {self.kind!r}, expected one of {', '.join(KINDS)}")
        self._check(isinstance(self.ops, tuple) and all(isinstance(op, str) for op in self.ops), "a tuple of op names")
        self._check(len(self.ops) > 0, "the name of at least one op")
        if self.kind == "fuse":
            self._check(len(self.ops) == 2 and self.ops[0] != self.ops[1], "the names of two ops")
        elif self.kind in BEFORE_CALIBRATION:
            self._check(len(self.ops) > 1, "ops that write channels and ops that read them")
        elif self.kind in ("bias", "round"):
            self._check(len(self.ops) == 1, "the name of one op")
        for name in ("observer", "scale", "zero_point", "values"):
            if name not in _FIELDS[self.kind]:
                kinds = ", ".join(kind for kind, own in _FIELDS.items() if name in own)
                self._check(not getattr(self, name), f"none: only {kinds} edits take one", name)
        if self.kind == "observer":
            self._check(self.observer in (*OBSERVERS,), ", ".join(OBSERVERS), "observer")
        if self.kind == "range":
            self._check_range()
        if "values" in _FIELDS[self.kind]:
            self._check_values()

    def _check(self, holds: bool, expected: str, field: str = "ops") -> None:
        if not holds:
            raise QuantizeError(f"edit {self.kind!r}: {field}: got {getattr(self, field)!r}, expected {expected}")

    def _check_values(self) -> None:
        try:
            found = self.numbers
        except (ValueError, TypeError) as error:
            raise QuantizeError(f"edit {self.kind!r}: values: {error}; expected numbers in base64") from error
        if not len(found) or not np.isfinite(found).all():
            raise QuantizeError(f"edit {self.kind!r}: values: expected finite numbers, one for each channel")
        if self.kind in ("scale", "smooth") and found.min() <= 0:
            raise QuantizeError(f"edit {self.kind!r}: values: expected positive numbers")

    @property
    def numbers(self) -> Array:
        """The values: int8 or float32."""
        return np.frombuffer(base64.b64decode(self.values, validate=True), "<i1" if self.kind == "round" else "<f4")

    def _check_range(self) -> None:
        scale, zero_point = self.scale, self.zero_point
        number = isinstance(scale, float | int) and not isinstance(scale, bool) and 0 < scale < math.inf
        self._check(number, "a positive number", "scale")
        self._check(isinstance(zero_point, int) and not isinstance(zero_point, bool), "an integer", "zero_point")
        rounded = ctypes.c_float(scale).value
        self._check(0 < rounded < math.inf, "a number that float32 can represent", "scale")
        object.__setattr__(self, "scale", rounded)

    def __repr__(self) -> str:
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return f"Edit({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    def __str__(self) -> str:
        joined = " + ".join(self.ops) if self.kind == "fuse" else ", ".join(self.ops)
        extra = f" {self.observer}".rstrip()
        if self.kind == "range":
            extra = f" {self.scale:.6g}, {self.zero_point}"
        elif self.values:
            extra = f" of {len(self.numbers)} {'weights' if self.kind == 'round' else 'channels'}"
        return f"{self.kind}{extra}: {joined}"


@dataclass(frozen=True, slots=True)
class OverridePlan:
    """Edits in the order in which they are applied.

    Args:
        edits: the edits.
        quantizer: the quantizer that they were made for, as reports show it: ``"xnnpack"``. With another quantizer, a
            plan is still applied, and the pair gets a note.
        model: class name of the model they were made for; with another one, the pair gets a note too.

    Raises:
        QuantizeError: a field has an invalid value.

    >>> plan = OverridePlan((Edit("float", ("fc/linear",)),), quantizer="xnnpack")
    >>> OverridePlan.from_json(plan.to_json()) == plan
    True
    """

    edits: tuple[Edit, ...]
    quantizer: str = ""
    model: str = ""

    make_quantizer: ClassVar[staticmethod[..., Quantizer]]
    """What :meth:`apply_to` calls; :mod:`pt2qa.overrides`, which knows quantizers, sets it."""

    def __post_init__(self) -> None:
        if not isinstance(self.edits, tuple) or not all(isinstance(edit, Edit) for edit in self.edits):
            raise QuantizeError(f"override plan: edits: got {self.edits!r}, expected a tuple of Edit")
        for name in ("quantizer", "model"):
            if not isinstance(getattr(self, name), str):
                raise QuantizeError(f"override plan: {name}: got {getattr(self, name)!r}, expected a string")

    def __str__(self) -> str:
        made_for = " on ".join(filter(None, (self.model, self.quantizer)))
        head = f"{len(self.edits)} edit{'' if len(self.edits) == 1 else 's'}" + (f" for {made_for}" if made_for else "")
        return "\n".join([head, *(f"  {edit}" for edit in self.edits)])

    def apply_to(self, quantizer: Any, *, qat: bool = False) -> Quantizer:
        """A quantizer with the edits of this plan, for a flow that pt2qa does not run.

        It annotates as the given one and then applies the edits: in ``prepare_pt2e``, ``prepare_qat_pt2e``, and where
        an exporter takes a quantizer, such as ExecuTorch's ``QuantizationRecipe``.  The result is that of
        :func:`pt2qa.quantize` with ``overrides=``.  Graphs with handles may be passed to it as well as those of a plain
        ``torch.export``, in which ops are found by their names.

        Args:
            quantizer: as :func:`pt2qa.quantize` takes it; it is not changed.
            qat: whether it is for ``prepare_qat_pt2e``.

        Returns:
            A torchao ``Quantizer``, for any number of models.  Its ``annotate`` raises SelectionError if the model does
            not have an op that the plan names, PluginError if the backend does not support an edit, and QuantizeError
            if an edit changes nothing or cannot be made.

        Raises:
            PluginError: there is no such quantizer.
            QuantizeError: the plan has ``bias`` or ``round`` edits.

        >>> plan = OverridePlan((Edit("float", ("fc/linear",)),))
        >>> quantizer = plan.apply_to("xnnpack")
        """
        late = sorted({edit.kind for edit in self.edits} & {"bias", "round"})
        if late:
            raise QuantizeError(
                f"the plan has {' and '.join(late)} edits, which are made after calibration, when no quantizer runs. "
                "Pass the plan to pt2qa.quantize, or use the code of the report that has it."
            )
        return self.make_quantizer(quantizer, self.edits, qat=qat)

    def to_json(self) -> str:
        """The plan as JSON text."""
        edits = [
            {key: value for key, value in asdict(edit).items() if key in _FIELDS[edit.kind] or key in ("kind", "ops")}
            for edit in self.edits
        ]
        head = {"format": _FORMAT, "version": SCHEMA, "quantizer": self.quantizer, "model": self.model}
        return json.dumps({**head, "edits": edits}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "override plan") -> OverridePlan:
        """Reads what :meth:`to_json` wrote.

        Args:
            text: JSON.
            source: its name in errors, such as the file's name.

        Raises:
            ReportError: the text is not an override plan, or has another version; the message names the field.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportError(f"{source}: is not valid JSON ({error}); expected an override plan") from error
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ReportError(f"{source}: is not an override plan: expected the field 'format' to be {_FORMAT!r}")
        if fields.get("version") != SCHEMA:
            raise ReportError(
                f"{source}: field 'version' holds {fields.get('version')!r}; this pt2qa reads version {SCHEMA}"
            )
        _check_keys(fields, ("format", "version", "quantizer", "model", "edits"), (), source, "")
        if not isinstance(fields["edits"], list):
            raise ReportError(f"{source}: field 'edits' holds {fields['edits']!r}, expected a list")
        edits = tuple(_edit(value, f"edits[{index}]", source) for index, value in enumerate(fields["edits"]))
        try:
            return cls(edits, quantizer=fields["quantizer"], model=fields["model"])
        except QuantizeError as error:
            raise ReportError(f"{source}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as a JSON file, whole or not at all.

        Raises:
            ReportError: the file cannot be written.
        """
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OverridePlan:
        """Reads a file that :meth:`save` wrote.

        Raises:
            ReportError: there is no such file, or it is not an override plan; the message names file and field.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ReportError(f"cannot read {path}: {reason or error}; expected an override plan") from error
        return cls.from_json(text, source=str(path))


def in_base64(numbers: Sequence[float] | Array, form: Literal["<f4", "<i1"] = "<f4") -> str:
    """Numbers as the ``values`` of an edit: float32, or int8."""
    return base64.b64encode(np.asarray(numbers, form).tobytes()).decode("ascii")


def _edit(value: Any, where: str, source: str) -> Edit:
    if not isinstance(value, dict):
        raise ReportError(f"{source}: field {where!r} holds {value!r}, expected an object")
    own = _FIELDS.get(str(value.get("kind")), ())
    _check_keys(value, ("kind", "ops"), own, source, f"{where}.")
    if not isinstance(value["ops"], list):
        raise ReportError(f"{source}: field '{where}.ops' holds {value['ops']!r}, expected a list of op names")
    try:
        return Edit(value["kind"], tuple(value["ops"]), **{name: value[name] for name in own if name in value})
    except (QuantizeError, TypeError) as error:
        raise ReportError(f"{source}: field {where!r}: {error}") from error


def _check_keys(
    fields: dict[str, Any], needed: tuple[str, ...], allowed: tuple[str, ...], source: str, prefix: str
) -> None:
    for name in needed:
        if name not in fields:
            raise ReportError(f"{source}: field '{prefix}{name}' is missing")
    for name in fields:
        if name not in (*needed, *allowed):
            raise ReportError(f"{source}: field '{prefix}{name}' is not one of {', '.join((*needed, *allowed))}")
