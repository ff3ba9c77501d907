"""A program with the inputs that a device must run, as ExecuTorch's ``example_runner`` takes them, and its commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from pt2qa.errors import DeploymentError
from pt2qa.plugins import write_atomic
from pt2qa_xnnpack.internals import METHOD, contents_of

SPARE = 2
"""The debug buffer in units of all values: ExecuTorch also records what a delegate reads."""


def bundle(path: Path, inputs: Path) -> tuple[str, ...]:
    """Writes the ``.bpte`` file beside the inputs, and returns one command for each batch, and what compares them.

    Raises:
        DeploymentError: the program is missing or is none, or takes other inputs.
        ReportError: the file cannot be written.
    """
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer
    from safetensors import safe_open

    made = inputs.with_name(f"{path.stem}.bpte")
    with safe_open(inputs, "pt") as file:
        batches = [
            [file.get_tensor(each["key"]) if "key" in each else each["value"] for each in batch["inputs"]]
            for batch in json.loads(file.metadata()["pt2qa"])
        ]
    try:
        size = SPARE * contents_of(path.read_bytes()).size
        suite = MethodTestSuite(METHOD, [MethodTestCase(values) for values in batches])
        bundled = BundledProgram(None, [suite], pte_file_path=str(path))
        data = serialize_from_bundled_program_to_flatbuffer(bundled)
    except Exception as error:  # whatever a damaged file makes it raise
        raise DeploymentError(f"{path}: not bundled with {inputs}: {type(error).__name__}: {error}") from error
    write_atomic(made, data)
    told = [
        f"example_runner --bundled_program_path {shlex.quote(str(made))} --testset_idx {number} "
        f"--etdump_path etdump{number}.etdp --debug_output_path etdump{number}.bin --debug_buffer_size {size} "
        "--dump_outputs --dump_intermediate_outputs"
        for number in range(len(batches))
    ]
    return (*told, "pt2qa deploy FLOW.py -q QUANTIZER -o DIR -b xnnpack:etrecord=etrecord.bin --deployed etdump0.etdp")
