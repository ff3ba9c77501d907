"""A program and the inputs that a device must run, in the file that ExecuTorch's example_runner takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.devtools.bundled_program.serialize import deserialize_from_flatbuffer_to_bundled_program
from executorch.exir import to_edge_transform_and_lower
from torch import nn

import pt2qa
from pt2qa._deployed.deployment import lines_from_backend

BATCHES = [torch.randn(1, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("device")
    model = nn.Linear(4, 2).eval()
    exported = torch.export.export(model, (BATCHES[0],))
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    (made / "model.pte").write_bytes(program.buffer)
    pt2qa.record_inputs(pt2qa.capture(model, BATCHES[0]), BATCHES, made / "inputs.safetensors")
    return made


def test_each_batch_has_a_command_with_a_buffer_for_all_values(folder: Path) -> None:
    *runs, deploy = lines_from_backend(folder / "model.pte", "record", folder / "inputs.safetensors")
    size = 2 * 4 * (4 + 2)
    assert runs == [
        f"example_runner --bundled_program_path {folder}/model.bpte --testset_idx {number} --etdump_path "
        f"etdump{number}.etdp --debug_output_path etdump{number}.bin --debug_buffer_size {size} "
        "--dump_outputs --dump_intermediate_outputs"
        for number in range(2)
    ]
    assert deploy.endswith("--deployed etdump0.etdp")


def test_the_bundle_has_the_program_and_the_inputs(folder: Path) -> None:
    lines_from_backend(folder / "model.pte", "record", folder / "inputs.safetensors")
    bundled = deserialize_from_flatbuffer_to_bundled_program((folder / "model.bpte").read_bytes())
    assert bundled.program == (folder / "model.pte").read_bytes()
    (suite,) = bundled.method_test_suites
    found = [bytes(case.inputs[0].val.data) for case in suite.test_cases]
    assert (suite.method_name, found) == ("forward", [batch.numpy().tobytes() for batch in BATCHES])


def test_what_is_no_program_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.pte").write_bytes(b"x")
    for name in ("broken.pte", "none.pte"):
        with pytest.raises(pt2qa.DeploymentError, match=f"{name}: not bundled with "):
            lines_from_backend(tmp_path / name, "record", folder / "inputs.safetensors")
    for name in ("model.tflite", "etdump.etdp"):  # the second is what a device recorded
        with pytest.raises(
            pt2qa.DeploymentError, match=rf"{name}: no installed backend reads such a file. Expected \.pte\.$"
        ):
            lines_from_backend(tmp_path / name, "record", folder / "inputs.safetensors")
    with pytest.raises(pt2qa.DeploymentError, match=r"Expected \.etdp, .*\.pte"):
        lines_from_backend(tmp_path / "model.tflite", "inspect")


def test_a_write_that_is_interrupted_leaves_the_bundle_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inputs.safetensors").write_bytes((folder / "inputs.safetensors").read_bytes())
    (tmp_path / "model.bpte").write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lines_from_backend(folder / "model.pte", "record", tmp_path / "inputs.safetensors")
    assert (tmp_path / "model.bpte").read_bytes() == b"before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["inputs.safetensors", "model.bpte"]


def interrupted(_: int) -> None:
    raise KeyboardInterrupt
