"""Lowering a pair to its backend, once: what was lowered can be kept in a folder and given again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pt2qa._deployed.taps import Lowerable, inputs_for
from pt2qa._exclusion import exports
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.rows import installed
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Backend, DeployedProgram, available, backend_of, resolve
from pt2qa.plugins.options import parse_options, with_options

INDEX = "pt2qa.json"


def backend_for(pair: QuantizedPair, wanted: str | Backend | None) -> Backend:
    """The backend that runs a pair here.

    Args:
        pair: its plug-in's backend is the default.
        wanted: the name of a plug-in, with options (``x86:isa=avx2``), or a backend.

    Raises:
        DeploymentError: there is none, or it cannot run on this machine.
    """
    if wanted is None:
        plugin = None if pair.recipe is None else pair.recipe.plugin
        name = pair.quantizer.partition(":")[0].partition(" ")[0]
        plugin = available().get(name) if plugin is None else plugin
        found = None if plugin is None else backend_of(plugin)
        who = f"quantizer {pair.quantizer!r}"
    elif isinstance(wanted, str):
        name, _, options = wanted.partition(":")
        found = backend_of(resolve(name))
        who = f"backend {wanted!r}"
        if found is not None and options:
            found = with_options(found, parse_options(found, options))
    else:
        found, who = wanted, repr(wanted)
    if found is None:
        known = ", ".join(name for name, each in available().items() if backend_of(each) is not None)
        raise DeploymentError(f"{who} has no backend that runs here. {_elsewhere()} Backends: {known or 'none'}.")
    if reason := found.missing():
        raise DeploymentError(f"{found.name} cannot run here: {reason}. {_elsewhere()}")
    return found


def _elsewhere() -> str:
    return (
        "Run the model where it runs: pt2qa record-inputs (pt2qa.record_inputs) writes the inputs, and "
        "compare_deployed(deployed='outputs.safetensors') compares what was recorded there."
    )


@exports
def program_for(
    pair: QuantizedPair,
    lowerable: Lowerable,
    backend: Backend,
    example: list[Any],
    folder: Path | None,
    progress: bool | None,
) -> DeployedProgram:
    """The lowered program of a pair: read from the folder if it is there, else lowered, and written to it.

    Raises:
        DeploymentError: the folder holds another program, or the model cannot be lowered.
    """
    if folder is not None and folder.exists():
        _check_index(folder, lowerable, backend)
        return backend.load(folder)
    with tqdm(total=0, bar_format="{desc} {elapsed}", disable=None if progress is None else not progress) as bar:
        program = backend.lower(
            lowerable.graph,
            inputs_for(example),
            lowerable.wanted,
            dynamic_shapes=lowerable.dynamic_shapes(),
            progress=lambda what: bar.set_description_str(f"{pair.model}: {what}"),
        )
    if folder is not None:
        _save(program, folder, lowerable, backend)
    return program


def _save(program: DeployedProgram, folder: Path, lowerable: Lowerable, backend: Backend) -> None:
    """Writes a folder that is there as a whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            program.save(made)
            (made / INDEX).write_text(json.dumps(_index(lowerable, backend), indent=1))
            made.chmod(0o755)
            os.rename(made, folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        raise DeploymentError(f"{folder}: the lowered program cannot be written: {error}") from error


def _check_index(folder: Path, lowerable: Lowerable, backend: Backend) -> None:
    try:
        found = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise DeploymentError(
            f"{folder}: not a lowered program of pt2qa ({type(error).__name__}: {error}). Give a folder that does not "
            "exist yet, or one that an earlier compare_deployed(program=...) wrote."
        ) from error
    wanted = _index(lowerable, backend)
    differing = [key for key, value in wanted.items() if not isinstance(found, dict) or found.get(key) != value]
    if differing:
        was = ", ".join(f"{key} {found.get(key)!r}, now {wanted[key]!r}" for key in differing)
        raise DeploymentError(
            f"{folder}: lowered from something else ({was}). Give another folder to lower this model, or remove it."
        )


def _index(lowerable: Lowerable, backend: Backend) -> dict[str, str]:
    packages = {package: installed(package) for package in ("torch", "torchao", "executorch")}
    return {"backend": backend.name, "graph": lowerable.digest, **packages}
