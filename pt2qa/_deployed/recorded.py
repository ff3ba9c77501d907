"""Outputs that were recorded where the model runs: a safetensors file, batch by batch.

Its tensors are ``batch0.output0``, ``batch0.output1`` … in the order in which the model returns them.  The metadata of
the inputs, if it was copied, says for each batch which inputs it was computed from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from pt2qa._report.prose import counted
from pt2qa._simulator.verification import digest_of
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran

SUFFIX: Final = ".safetensors"
METADATA: Final = "pt2qa"
"""The key of the description of each batch, in the metadata of both files."""

_NAME: Final = re.compile(r"batch(0|[1-9]\d*)\.output(0|[1-9]\d*)")


@dataclass
class RecordedOutputs:
    """A program that returns what a device recorded, batch after batch; see :class:`pt2qa.plugins.DeployedProgram`.

    ``outputs`` says how many each batch has, ``digests`` which inputs it was computed from, if the file does.
    """

    path: Path
    outputs: tuple[int, ...]
    digests: tuple[str, ...]
    facts: tuple[str, ...]
    read: int = 0
    taps: Mapping[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()

    def run(self, inputs: Sequence[Any]) -> Ran:
        number = self.read
        if number == len(self.outputs):
            raise DeploymentError(
                f"{self.path}: has the outputs of {counted(number, 'batch', 'batches')}, but there are more to "
                "compare. Pass the batches whose inputs were recorded."
            )
        if self.digests and self.digests[number] != digest_of(inputs):
            raise DeploymentError(
                f"{self.path}: batch {number} was computed from other inputs. Pass the batches whose inputs were "
                "recorded, in the same order; a loader that shuffles gives others each time."
            )
        self.read += 1
        with safe_open(self.path, "pt") as file:
            return Ran(tuple(file.get_tensor(f"batch{number}.output{n}") for n in range(self.outputs[number])))

    def refuse_rest(self) -> None:
        """Refuses a file that has batches that were not asked for."""
        if self.read < len(self.outputs):
            raise DeploymentError(
                f"{self.path}: has the outputs of {counted(len(self.outputs), 'batch', 'batches')}; {self.read} were "
                "given to compare with. Pass all batches whose inputs were recorded."
            )

    def save(self, folder: Path) -> None:
        raise DeploymentError(f"{self.path}: recorded outputs are not a program and cannot be saved.")


def read_outputs(path: Path) -> RecordedOutputs:
    """Opens a file of recorded outputs, and checks that no tensor is missing or unknown."""
    try:
        with safe_open(path, "pt") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise DeploymentError(f"{path}: not a safetensors file: {error}") from error
    found = {name: _NAME.fullmatch(name) for name in names}
    if unknown := [name for name, match in found.items() if match is None]:
        raise DeploymentError(
            f"{path}: has a tensor {unknown[0]!r}; expected the outputs of each batch: batch0.output0, batch0.output1, "
            "batch1.output0 …"
        )
    places = {(int(match[1]), int(match[2])) for match in found.values() if match is not None}
    batches = 1 + max((batch for batch, _ in places), default=-1)
    counts = tuple(
        1 + max((place for number, place in places if number == batch), default=0) for batch in range(batches)
    )
    for batch, count in enumerate(counts):
        for place in range(count):
            if (batch, place) not in places:
                raise DeploymentError(f"{path}: has no tensor 'batch{batch}.output{place}', but has later ones.")
    if not batches:
        raise DeploymentError(f"{path}: is empty; expected the outputs of each batch: batch0.output0 …")
    digests = _digests(path, metadata, batches)
    said = "" if digests else "; the file does not identify their inputs"
    return RecordedOutputs(path, counts, digests, (f"{path.name}: outputs recorded elsewhere{said}",))


def _digests(path: Path, metadata: Mapping[str, str], batches: int) -> tuple[str, ...]:
    if METADATA not in metadata:
        return ()
    try:
        found = tuple(str(batch["digest"]) for batch in json.loads(metadata[METADATA]))
    except (ValueError, TypeError, KeyError) as error:
        raise DeploymentError(
            f"{path}: its metadata {METADATA!r} is not that of recorded inputs ({type(error).__name__}: {error})."
        ) from error
    if len(found) != batches:
        raise DeploymentError(
            f"{path}: has the outputs of {counted(batches, 'batch', 'batches')}; inputs were recorded for {len(found)}."
        )
    return found
