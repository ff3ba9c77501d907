"""CPU features that decide how int8 kernels accumulate."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection
from pathlib import Path

from pt2qa._graph.internals.torch import instructions_found
from pt2qa.errors import SelectionError

_NAMED = {"vnni": frozenset({"avx512_vnni"}), "no-vnni": frozenset({"avx2"})}
_CPUINFO = Path("/proc/cpuinfo")
_FEATURE = re.compile(r"[a-z0-9_.]+")


def cpu_features(cpu: str | Collection[str] | None) -> frozenset[str]:
    """The features of a CPU, as Linux names them.

    Args:
        cpu: the features; or ``"vnni"`` or ``"no-vnni"``; None: this machine's.

    Raises:
        SelectionError: it is neither a collection of names nor one of the two words.

    >>> sorted(cpu_features("vnni"))
    ['avx512_vnni']
    """
    if cpu is None:
        return _of_this_machine()
    if isinstance(cpu, str):
        if cpu not in _NAMED:
            raise SelectionError(
                f"cpu: got {cpu!r}, expected 'vnni', 'no-vnni', or the features as a set: {{'avx2', 'avx512_vnni'}}"
            )
        return _NAMED[cpu]
    names = frozenset(str(name).lower() for name in cpu)
    if wrong := sorted(name for name in names if not _FEATURE.fullmatch(name)):
        raise SelectionError(
            f"cpu: {wrong[0]!r} is not the name of a CPU feature; expected names such as 'avx512_vnni'"
        )
    return names


def _of_this_machine() -> frozenset[str]:
    """What the kernel lists; if it lists nothing, what torch detects."""
    lines = _CPUINFO.read_text(errors="replace").splitlines() if _CPUINFO.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    if flags:
        return frozenset(flags.partition(":")[2].lower().split())
    return frozenset({platform.machine().lower(), *(name for name, there in instructions_found().items() if there)})
