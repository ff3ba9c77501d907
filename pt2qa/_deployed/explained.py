"""What the structure check knows about a fault of the backend: its rules look at the same graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from pt2qa._check.analysis import check
from pt2qa._check.report import Finding
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Backend, available, backend_of, rules_of

OF_ALL_KERNELS = ("bias-overflow",)
"""Rules of no plug-in that are about kernels."""


@contextmanager
def explained(pair: QuantizedPair, backend: Backend | None) -> Iterator[None]:
    """Adds to a failure of the backend what the check finds in the model."""
    try:
        yield
    except DeploymentError as error:
        reasons = [about(each) for each in _findings(pair, backend) if each.severity == "error"]
        if not reasons:
            raise
        raise DeploymentError(f"{error}\nThe check finds in this model: {'; '.join(reasons)}") from error


def reasons_for(pair: QuantizedPair, backend: Backend | None, names: Collection[str]) -> list[str]:
    """What the check finds at these ops."""
    return [about(each) for each in _findings(pair, backend) if each.name in names] if names else []


def about(finding: Finding) -> str:
    return f"{finding.name}: {finding.why} ({finding.rule})"


def _findings(pair: QuantizedPair, backend: Backend | None) -> tuple[Finding, ...]:
    plugins = (each for each in available().values() if backend is not None and type(backend_of(each)) is type(backend))
    if (plugin := next(plugins, None)) is None:
        return ()
    rules = [rule.id for rule in rules_of(plugin)]
    return check(pair, quantizer=plugin, rules=[*rules, *OF_ALL_KERNELS], progress=False).rows
