"""check_quantizer: every property on every model; and the same as a pytest class, with a test for each."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tqdm import tqdm

from pt2qa._ambient import torch_defaults
from pt2qa._conformance.models import MODELS
from pt2qa._conformance.nets import ConformanceModel
from pt2qa._conformance.properties import PROPERTIES, Property
from pt2qa._conformance.properties.property import Outcome, failed
from pt2qa._conformance.properties.soundness import NO_SPEC, backend_spec
from pt2qa._conformance.report import ConformanceReport, ConformanceRow, ModelCoverage
from pt2qa._conformance.trial import Failure, QuantizerUnderTest, Trial
from pt2qa._exclusion import exports
from pt2qa._printable import did_you_mean
from pt2qa._report.notes import Note
from pt2qa._report.rows import Environment
from pt2qa.errors import CaptureError, SelectionError
from pt2qa.overrides.points import OUTPUT
from pt2qa.plugins import BackendSpec

if TYPE_CHECKING:
    import pytest

Named = TypeVar("Named", ConformanceModel, Property)


@torch_defaults
@exports
def check_quantizer(
    quantizer: Any,
    *,
    models: Iterable[str | ConformanceModel] | None = None,
    properties: Iterable[str | Property] | None = None,
    qat: bool = False,
    spec: BackendSpec | None = None,
    progress: bool | None = None,
) -> ConformanceReport:
    """Checks whether a quantizer behaves, on small models of one pattern each.

    Warnings from torch and the quantizer are hidden, and never become errors.

    Args:
        quantizer: anything :func:`pt2qa.quantize` takes (a name, a plug-in, a torchao ``Quantizer``), or a function
            without arguments that returns one. Pass a function if the quantizer keeps state: each graph then gets a
            new quantizer, and only the property ``reuse`` annotates several graphs with one.
        models: names of :data:`pt2qa._conformance.MODELS`, or your own models; None: all that ship with pt2qa.
        properties: names of :data:`pt2qa._conformance.PROPERTIES`, or your own properties; None: all.
        qat: prepare for quantization-aware training.
        spec: what the backend takes, for the property ``backend_spec``; None: as the plug-in or the quantizer states it
            in an attribute ``spec``. Without one, the property does not apply.
        progress: whether to show a progress bar; None: only if stderr is a terminal.

    Returns:
        One row for each property and model.

    Raises:
        SelectionError: a model or property name is unknown, or ``spec`` is not one.
        PluginError: ``quantizer`` is not a quantizer.
        CaptureError: one of your own models cannot be captured.

    >>> from pt2qa.testing import check_quantizer
    >>> report = check_quantizer("x86", models=["linear"], properties=["prepare", "convert"], progress=False)
    >>> report.passed
    True
    """
    if spec is not None and not isinstance(spec, BackendSpec):
        raise SelectionError(f"spec: got {type(spec).__name__}, expected a BackendSpec")
    tested = QuantizerUnderTest(quantizer, qat, spec)
    run = ConformanceRun(tested, chosen("model", models, MODELS))
    wanted = chosen("property", properties, PROPERTIES)
    name, rows = tested.name, []
    disable = None if progress is None else not progress
    for model in tqdm(run.trials, desc=f"check {name}", unit="model", disable=disable, leave=False):
        for each in wanted.values():
            start = time.perf_counter()
            found = run.outcome(each, model)
            rows.append(ConformanceRow(name, each.name, model, found.verdict, found.why, time.perf_counter() - start))
    unjudged = backend_spec.name in wanted and tested.spec is None
    return ConformanceReport(
        rows=tuple(rows),
        coverage=tuple(run.coverage(model) for model in run.trials),
        notes=(
            tested.note,
            *([Note(f"{backend_spec.name} was not applied: {NO_SPEC}", "no spec")] if unjudged else []),
        ),
        quantizer=name,
        environment=Environment.here(""),
        models=len({*MODELS, *run.trials}),
        properties=len({*PROPERTIES, *wanted}),
    )


class ConformanceRun:
    """One quantizer on several models, keyed by name."""

    def __init__(self, quantizer: QuantizerUnderTest, models: Mapping[str, ConformanceModel]) -> None:
        self.quantizer = quantizer
        alone = [Trial(quantizer, model) for model in list(models.values())[:2]]
        self.trials = {
            name: Trial(quantizer, model, [other for other in alone if other.model is not model])
            for name, model in models.items()
        }

    def outcome(self, wanted: Property, model: str) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return wanted.check(self.trials[model])
            except CaptureError:  # the model itself is at fault
                raise
            except Exception as error:  # one property that raises must not stop the others
                return failed(f"stopped with {type(error).__name__}: {str(error) or 'no message'}")

    def coverage(self, model: str) -> ModelCoverage:
        trial = self.trials[model]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            annotated = trial.annotated
        if isinstance(annotated, Failure):
            return ModelCoverage(model, trial.model.pattern, 0, 0)
        annotations = annotated.annotations
        values = ("input", OUTPUT)
        ops = sum(not node.constant and node.op not in values for node in annotations.graph.nodes.values())
        quantized = sum("float" in op.levels and op.op not in values for op in annotations.ops.values())
        return ModelCoverage(model, trial.model.pattern, ops, quantized)


def chosen(what: str, wanted: Iterable[str | Named] | None, known: Mapping[str, Named]) -> dict[str, Named]:
    """The requested models or properties (``what``, for errors) by name; all known ones for None."""
    if wanted is None:
        return dict(known)
    if isinstance(wanted, str):
        raise SelectionError(f"{what}: got the text {wanted!r}, expected a list of names: [{wanted!r}]")
    found: dict[str, Named] = {}
    for each in wanted:
        if isinstance(each, str) and each not in known:
            raise SelectionError(f"there is no {what} {each!r}{did_you_mean(each, known)} Known: {', '.join(known)}")
        one = known[each] if isinstance(each, str) else each
        if one.name in found:
            raise SelectionError(f"{what} {one.name!r} is given twice: names must be unique")
        found[one.name] = one
    if not found:
        raise SelectionError(f"no {what} was given: leave it out for all of {', '.join(known)}")
    return found


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
    @functools.cache
    def _run(cls) -> ConformanceRun:
        """The run whose graphs the tests of this class share."""
        tested = QuantizerUnderTest(lambda: cls().make_quantizer(), cls.qat, cls.spec)
        return ConformanceRun(tested, chosen("model", cls.models, MODELS))


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
