"""What Arm's compiler Vela makes of a delegate for an Ethos-U; no device is needed, and none runs it."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from executorch.backends.arm.arm_vela import vela_compile
from executorch.backends.arm.ethosu import EthosUCompileSpec

from pt2qa.errors import DeploymentError
from pt2qa_arm.internals import prints_into


def estimates(target: str, specification: str, flatbuffers: Sequence[bytes]) -> Iterator[str]:
    """What each delegate takes on an Ethos-U, as facts.

    Args:
        target: the accelerator, such as ``ethos-u55-128``.
        specification: for which the delegates were lowered.
        flatbuffers: of the delegates.

    Raises:
        DeploymentError: Vela is not installed, knows no such accelerator, or does not compile a delegate; the
            specification is not the accelerator's.
    """
    if find_spec("ethosu") is None:
        raise DeploymentError(f"vela={target}: ethos-u-vela not installed: pip install ethos-u-vela")
    try:
        spec = EthosUCompileSpec(target)
    except RuntimeError as error:
        raise DeploymentError(f"vela={target}: {error}. Expected one like ethos-u55-128 or ethos-u85-256") from error
    if str(spec.tosa_spec) != specification:
        raise DeploymentError(
            f"vela={target} needs what was lowered for specification={spec.tosa_spec}, got {specification}"
        )
    for number, flatbuffer in enumerate(flatbuffers):
        found = _compiled(target, flatbuffer, spec.compiler_flags)
        cycles, memory = int(found["cycles_total"]), float(found["sram_memory_used"])
        yield (
            f"Vela {version('ethos-u-vela')} for {target}, delegate {number}: {cycles} cycles by its estimate, "
            f"{memory:.2f} KiB of SRAM, {found['total_npu_encoded_weights']} bytes of weights"
        )


def _compiled(target: str, flatbuffer: bytes, flags: Sequence[str]) -> dict[str, str]:
    """The row of Vela's summary."""
    printed, native = io.StringIO(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with prints_into(native), redirect_stdout(printed):
                vela_compile(flatbuffer, list(flags), intermediate_path=folder)
            (summary,) = Path(folder).glob("output/*summary*.csv")
            (row,) = csv.DictReader(summary.read_text().splitlines())
        except (Exception, SystemExit) as error:  # Vela is a program, which exits where it cannot go on
            said = " ".join([*printed.getvalue().split(), *native])
            raise DeploymentError(f"vela={target}: Vela could not compile a delegate: {error}: {said}") from error
    return row
