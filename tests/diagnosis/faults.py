"""A kind of fault: what is planted, and what is right to say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.diagnosis.subject import Planted, Subject


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        id: what tables call it.
        sentence: what is wrong.
        causes: what a diagnosis may call it, normally one.
        plant: plants it in a healthy subject, which it may edit; None where the subject has no place for it.
        finding: for what costs no accuracy, the rule of :func:`pt2qa.check` that must be shown.
        note: the same, a regular expression of a note or of a line of the verdict.
        error: for what cannot get as far as a diagnosis, a regular expression of the error that planting must raise.
        beside: of two faults, the cause of the smaller one, which must be named as well.
    """

    id: str
    sentence: str
    causes: tuple[str, ...]
    plant: Callable[[Subject], Planted | None]
    finding: str = ""
    note: str = ""
    error: str = ""
    beside: str = ""

    @property
    def costs(self) -> bool:
        """Whether the model loses accuracy by it."""
        return bool(self.causes)


FAULTS: dict[str, Fault] = {}
"""All kinds, in the order in which their modules add them."""


def fault(
    sentence: str, *causes: str, finding: str = "", note: str = "", error: str = "", beside: str = ""
) -> Callable[[Callable[[Subject], Planted | None]], Callable[[Subject], Planted | None]]:
    """Makes a function that plants a kind of fault; its name is the id."""

    def added(plant: Callable[[Subject], Planted | None]) -> Callable[[Subject], Planted | None]:
        name = plant.__name__.replace("_", "-")
        # pytest may import a module a second time.
        assert name not in FAULTS or FAULTS[name].sentence == sentence, f"two faults are called {name}"
        FAULTS[name] = Fault(name, sentence, causes, plant, finding, note, error, beside)
        return plant

    return added


def every_fault() -> dict[str, Fault]:
    """All kinds of all modules."""
    from tests.diagnosis import (
        planted_in_converted,
        planted_in_data,
        planted_in_graphs,
        planted_in_kernels,
        planted_in_models,
        planted_in_specs,
        planted_in_vain,
        planted_together,
    )

    assert planted_in_converted, planted_in_data
    assert planted_in_graphs, planted_together
    assert planted_in_kernels, planted_in_models
    assert planted_in_specs, planted_in_vain
    return FAULTS
