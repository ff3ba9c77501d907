"""The releases of torch, torchao and executorch that the internals are known of: those that pt2qa requires."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

STACK = ("torch", "torchao", "executorch")

CONTRACTS = "python -m pytest tests/graph/test_internals.py tests/quantizers/test_internals.py"
"""Names, in a checkout, what is different in a release."""


def untested(version_of: Callable[[str], str] = version) -> str:
    """Which installed releases are outside the ranges that pt2qa was tested with, in words; empty if none is.

    >>> untested({"torch": "2.15.1+cpu", "torchao": "0.18.0", "executorch": "1.5.1"}.__getitem__)
    ''
    """
    outside = []
    # Several extras need executorch.
    for needed in map(Requirement, dict.fromkeys(each.partition(";")[0] for each in requires("pt2qa") or [])):
        try:
            found = version_of(needed.name) if needed.name in STACK else None
        except PackageNotFoundError:  # executorch is optional
            continue
        if found is not None and not needed.specifier.contains(found, prereleases=True):
            outside.append(f"{needed.name} {found} (tested: {needed.specifier})")
    if not outside:
        return ""
    return (
        f"pt2qa {version('pt2qa')} is not tested with {', '.join(outside)}. It relies on internals of these packages, "
        f"which may have changed: in a checkout of pt2qa, the failures of `{CONTRACTS}` name what did"
    )
