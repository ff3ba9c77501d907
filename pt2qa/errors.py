"""The errors pt2qa raises.  Each message says what was given, what was expected and what to do."""

from __future__ import annotations

from pt2qa._printable import clean_lines


class Pt2qaError(Exception):
    """Base of every error that pt2qa raises on purpose.  Its text names what files hold, so it is cleaned.

    >>> try:
    ...     pt2qa.quantizer("xnpack")
    ... except pt2qa.Pt2qaError as error:
    ...     print(f"{type(error).__name__}: {error}")
    PluginError: no quantizer is named 'xnpack'; did you mean 'xnnpack'? Installed: tosa, x86, xnnpack...
    """

    def __str__(self) -> str:
        return clean_lines(super().__str__())


class CaptureError(Pt2qaError):
    """The model cannot be captured, or its capture computes something else than the model.

    Its text is ``what`` is wrong, ``advice`` on what to do, and ``more`` on torch's own message, where there is one.
    """

    def __init__(self, what: str, advice: str = "", more: str = "") -> None:
        super().__init__(what + advice + more)
        self.what, self.advice, self.more = what, advice, more


class BatchError(Pt2qaError):
    """A batch does not fit the captured inputs."""


class PluginError(Pt2qaError):
    """A quantizer plug-in is unknown, fails to load, or was given options it does not have."""


class QuantizeError(Pt2qaError):
    """Prepare, calibration or convert failed, or changed numbers that it must not change."""


class PairingError(Pt2qaError):
    """Two graphs do not belong together."""


class SimulationError(Pt2qaError):
    """The simulator does not compute what the converted graph computes, or a graph cannot run."""


class DeploymentError(Pt2qaError):
    """A model cannot be lowered to its backend, or what was lowered cannot be read or run here."""


class ReportError(Pt2qaError):
    """A report file is damaged, foreign, or of another version."""


class FlowError(Pt2qaError):
    """A flow file given to the command line does not hold what it should."""


class SelectionError(Pt2qaError):
    """A name or pattern matches nothing, or what is asked for cannot be read."""


class RankError(Pt2qaError):
    """One of several processes that work together failed, or there are none."""
