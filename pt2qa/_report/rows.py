"""What any report may contain: its environment, and nodes without a partner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pt2qa import __version__
from pt2qa._report.columns import column


@dataclass(frozen=True, slots=True)
class Environment:
    """Origin of a report: package versions as pip reports them, and the model's fingerprint.

    Args:
        torch, torchao, executorch, pt2qa: versions, or ``"not installed"``.
        fingerprint: identifies the float model (its graph and parameters); empty if nothing was fingerprinted.

    >>> Environment.here("3f2a").fingerprint
    '3f2a'
    """

    torch: str
    torchao: str
    executorch: str
    pt2qa: str
    fingerprint: str

    @classmethod
    def here(cls, fingerprint: str) -> Environment:
        """The installed versions, read from package metadata: nothing is imported."""
        return cls(installed("torch"), installed("torchao"), installed("executorch"), __version__, fingerprint)


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A node of one graph that has no partner in the other, and why.

    Args:
        handle: the node's handle; -1 if it has none.
        name: readable, e.g. ``layer1.0.bn1/batch_norm``.
        side: the graph it is in; ``a`` or ``b`` where :func:`pt2qa.compare_graphs` compared two.
        reason: why it has no partner, e.g. ``folded into layer1.0.conv1``.
    """

    handle: int
    name: Annotated[str, column(key=True)]
    side: Literal["reference", "quantized", "deployed", "a", "b"]
    reason: str


def installed(package: str) -> str:
    """The installed version of a package, or ``"not installed"``; the package is not imported.

    >>> installed("surely-no-such-package")
    'not installed'
    """
    # Imported here because importlib.metadata pulls in email and zipfile, which reading a report does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
