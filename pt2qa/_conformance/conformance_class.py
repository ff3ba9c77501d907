"""A pytest class for authors of quantizers: one test for each property and model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from pt2qa._conformance.conformance import ConformanceRun, chosen
from pt2qa._conformance.model import ConformanceModel
from pt2qa._conformance.models import MODELS
from pt2qa._conformance.properties import PROPERTIES, Property
from pt2qa._conformance.trial import QuantizerUnderTest
from pt2qa._near_names import did_you_mean
from pt2qa.errors import SelectionError
from pt2qa.plugins import BackendSpec

if TYPE_CHECKING:
    import pytest

Expected = Mapping[str | tuple[str, str], str]


class QuantizerConformance:
    """Subclass it in a test file, and pytest collects a test for each property and model.

    Their ids are ``spelling-conv_bn_relu``; ``pytest -k spelling`` runs one property.  Tests of one model run
    together and share its graphs; with pytest-xdist, ``--dist loadscope`` keeps a class in one process.

    Attributes:
        models: as :func:`check_quantizer` takes them.
        properties: as :func:`check_quantizer` takes them.
        qat: whether the quantizer is for quantization-aware training.
        spec: as :func:`check_quantizer` takes it.
        xfail: why a property fails, by ``(property, model)``, or by ``property`` for all models. If a pair that is
            expected to fail passes, its test fails.

    >>> class TestMine(QuantizerConformance):
    ...     xfail = {("shared_specs", "cat"): "cat shares with a later input"}
    ...
    ...     def make_quantizer(self):
    ...         from my_backend import MyQuantizer
    ...
    ...         return MyQuantizer()
    """

    models: ClassVar[Iterable[str | ConformanceModel] | None] = None
    properties: ClassVar[Iterable[str | Property] | None] = None
    qat: ClassVar[bool] = False
    spec: ClassVar[BackendSpec | None] = None
    xfail: ClassVar[Expected] = {}

    def make_quantizer(self) -> Any:
        """A new quantizer: anything that :func:`pt2qa.quantize` takes."""
        raise NotImplementedError(f"{type(self).__name__} needs make_quantizer(self), which returns the quantizer")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: the tests of this class."""
        if "conformance_property" not in metafunc.fixturenames:
            return
        models = chosen("model", self.models, MODELS)
        properties = chosen("property", self.properties, PROPERTIES)
        _check_expected(type(self).__name__, self.xfail, models, properties)
        metafunc.parametrize(
            ("conformance_property", "conformance_model"),
            [(each, model) for model in models for each in properties],
            ids=[f"{each}-{model}" for model in models for each in properties],
        )

    def test_conformance(self, conformance_property: str, conformance_model: str) -> None:
        """The property holds on the model."""
        pytest = _pytest()
        properties = chosen("property", self.properties, PROPERTIES)
        outcome = self._run().outcome(properties[conformance_property], conformance_model)
        pair = (conformance_property, conformance_model)
        reason = self.xfail.get(pair, self.xfail.get(conformance_property))
        if outcome.verdict == "failed":
            if reason is None:
                pytest.fail(outcome.why, pytrace=False)
            pytest.xfail(f"{reason}: {outcome.why}")
        if pair in self.xfail:
            pytest.fail(f"{outcome.verdict}, but expected to fail ({reason}): take it out of xfail", pytrace=False)
        if outcome.verdict != "passed":
            pytest.skip(f"{outcome.verdict}: {outcome.why}")

    @classmethod
    def _run(cls) -> ConformanceRun:
        """The run whose graphs the tests of this class share."""
        found: ConformanceRun | None = cls.__dict__.get("_shared_run")
        if found is None:
            tested = QuantizerUnderTest(lambda: cls().make_quantizer(), cls.qat, cls.spec)
            found = cls._shared_run = ConformanceRun(tested, chosen("model", cls.models, MODELS))
        return found

    _shared_run: ClassVar[ConformanceRun | None] = None


def _check_expected(
    name: str, expected: Expected, models: Mapping[str, ConformanceModel], properties: Mapping[str, Property]
) -> None:
    """An expected failure must name a known property and model, or it would go stale unnoticed."""
    for key in expected:
        wanted = (key,) if isinstance(key, str) else tuple(key)
        for what, each, known in zip(("property", "model"), wanted, (properties, models), strict=False):
            if each not in known:
                raise SelectionError(
                    f"{name}.xfail: there is no {what} {each!r}{did_you_mean(each, known)} Known: {', '.join(known)}"
                )


def _pytest() -> ModuleType:
    try:
        import pytest
    except ImportError as error:
        raise ImportError("QuantizerConformance runs under pytest: pip install pytest, or pt2qa[dev]") from error
    return pytest
