"""``pt2qa.check`` runs every rule that has something to look at, says which had not, and never changes the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._check import analysis
from pt2qa._check.analysis import cpu_features
from pt2qa._check.context import CheckContext
from pt2qa._check.rules import RULES
from pt2qa._check.rules.capturing import train_mode
from pt2qa.plugins import DoesNotApplyError, Found, GenericPlugin, Rule, available
from tests.flows import residual_pair
from tests.models import images, residual


def in_training() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(4)))


def rule(id: str, **changes: object) -> Rule:
    plain = Rule(id, "warning", "made up", "Nothing.", "nothing to do", lambda context: ())
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Puts rules in the place of all others."""
    return lambda *rules: monkeypatch.setattr(analysis, "RULES", {one.id: one for one in rules})


def test_a_finding_says_where_why_and_what_to_do() -> None:
    first, second = pt2qa.check(in_training(), rules=["train-mode"])
    assert (first.name, second.name) == ("1", "2.0")
    assert (first.rule, first.severity) == ("train-mode", "error")
    assert first.why == "Dropout is in training mode"
    assert "model.eval()" in first.fix


def test_silenced_findings_are_counted() -> None:
    findings = pt2qa.check(in_training(), rules=["train-mode"], silence=["train-mode:2.*"])
    assert [row.name for row in findings] == ["1"]
    assert [(one.outcome, one.count, one.silenced) for one in findings.rules] == [("found", 1, 1)]
    assert "1 finding silenced" in str(findings)
    everything = pt2qa.check(in_training(), rules=["train-mode"], silence=["train-mode"])
    assert not everything
    assert everything.rules[0].silenced == 2


def test_a_pair_is_not_annotated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = residual_pair()
    quantizer = type(pair.recipe.plugin.build(pair.float_graph, qat=False))
    annotate, graphs = quantizer.annotate, []
    monkeypatch.setattr(quantizer, "annotate", lambda self, graph: graphs.append(graph) or annotate(self, graph))
    rules = [one for one in RULES if one != "in-place-spelling"]  # which annotates another graph
    pt2qa.check(pair, batches=[images()], rules=rules, progress=False)
    pt2qa.annotations(pair)
    assert not graphs


def test_a_pair_for_training_is_checked_as_such() -> None:
    capture = pt2qa.capture(residual().eval(), images(2))
    pair = pt2qa.quantize(capture, "x86", [images(2)], qat=True, progress=False)
    findings = pt2qa.check(pair, rules=["unfoldable-batch-norm"])
    assert findings.rules[0].reason.startswith("to quantization-aware training")


def test_an_unknown_rule_is_an_error_with_the_nearest() -> None:
    with pytest.raises(pt2qa.SelectionError, match=r"rules: there is no rule 'train-mod'; did you mean 'train-mode'\?"):
        pt2qa.check(in_training(), rules=["train-mod"])
    with pytest.raises(pt2qa.SelectionError, match=r"silence: there is no rule 'dropout'.*There are .*train-mode"):
        pt2qa.check(in_training(), silence=["dropout:1"])


def test_what_cannot_be_checked_is_an_error() -> None:
    with pytest.raises(pt2qa.SelectionError, match=r"got Tensor, expected an nn\.Module, a Capture, a QuantizedPair"):
        pt2qa.check(torch.zeros(1))


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ("capture", "without example inputs: pt2qa.check(model, args)"),
        ("graph", "without example inputs: pt2qa.check(model, args)"),
        ("annotations", "without a quantizer: pass quantizer="),
        ("prepared", "without a prepared graph"),
        ("pair", "without a quantized pair: pass what pt2qa.quantize returns"),
        ("layers", "without a quantized pair: pass what pt2qa.quantize returns"),
    ],
)
def test_a_rule_without_what_it_needs_is_not_applied(need: str, reason: str, only) -> None:  # type: ignore[no-untyped-def]
    only(rule("needy", needs=(need,), find=lambda context: [Found("x", "never reached")]))
    findings = pt2qa.check(nn.Linear(2, 2).eval())
    assert [(one.outcome, one.reason) for one in findings.rules] == [("not applied", reason)]
    assert f"Not applied, needy: {reason}." in findings.summary()


def test_a_rule_may_say_that_it_does_not_apply(only) -> None:  # type: ignore[no-untyped-def]
    def find(context: CheckContext) -> list[Found]:
        raise DoesNotApplyError("to models without convolutions")

    only(rule("idle", find=find))
    assert pt2qa.check(nn.Linear(2, 2)).rules[0].reason == "to models without convolutions"


def test_a_failure_of_the_quantizer_is_found_once_and_kept_for_its_rule(only) -> None:  # type: ignore[no-untyped-def]
    calls = []

    @dataclass(frozen=True)
    class Broken:
        name: ClassVar[str] = "broken"
        summary: ClassVar[str] = "fails"

        def build(self, graph: object, *, qat: bool) -> object:
            calls.append(qat)
            raise pt2qa.PluginError("no such thing")

    def failures(context: CheckContext) -> list[Found]:
        return [Found(what, str(error)) for what, error in context.errors.items()]

    need = ("annotations",)
    only(rule("one", needs=need), rule("two", needs=need), rule("failures", find=failures))
    findings = pt2qa.check(pt2qa.capture(nn.Linear(2, 2).eval(), torch.zeros(1, 2)), quantizer=Broken(), qat=True)
    assert [one.outcome for one in findings.rules] == ["not applied", "not applied", "found"]
    assert findings.rules[0].reason == "the quantizer could not annotate the graph"
    assert [(row.name, row.why) for row in findings] == [("annotations", "no such thing")]
    assert calls == [True]


def test_errors_come_first_and_the_findings_of_a_rule_stay_together(only) -> None:  # type: ignore[no-untyped-def]
    only(
        rule("a", severity="note", find=lambda s: [Found("n", "."), Found("m", ".")]),
        rule(
            "b",
            find=lambda s: [Found("small", ".", value=1.0), Found("none", ".", value=nan), Found("big", ".", value=9)],
        ),
        rule("c", severity="note", find=lambda s: [Found("x", "."), Found("y", ".", severity="error", fix="run")]),
    )
    findings = pt2qa.check(nn.Linear(2, 2))
    assert [row.name for row in findings] == ["x", "y", "big", "small", "none", "n", "m"]
    assert (findings.error_count, findings.warning_count, findings.note_count) == (1, 3, 3)
    assert [row.fix for row in findings.of("c")] == ["nothing to do", "run"]


def test_a_plugin_brings_rules_of_its_own(only) -> None:  # type: ignore[no-untyped-def]
    own = rule("own", find=lambda context: [Found("", f"for {context.plugin.name}")])
    only(rule("general"))

    @dataclass(frozen=True)
    class Bringing(GenericPlugin):
        def rules(self) -> tuple[Rule, ...]:
            return (own,)

    plugin = Bringing(available()["x86"].build(pt2qa.capture(residual(), images()).module(), qat=False))
    findings = pt2qa.check(pt2qa.capture(residual(), images()), quantizer=plugin)
    assert [row.why for row in findings] == ["for X86InductorQuantizer"]
    only(own)
    with pytest.raises(pt2qa.PluginError, match="has a rule 'own', which exists already"):
        pt2qa.check(pt2qa.capture(residual(), images()), quantizer=plugin)


def test_an_op_carries_the_line_of_the_users_file(only) -> None:  # type: ignore[no-untyped-def]
    only(rule("every", needs=("graph",), find=lambda s: [Found(name, "is there") for name in s.nodes]))
    for strict in (False, True):
        findings = pt2qa.check(pt2qa.capture(residual(), images(), strict=strict))
        sources = {row.name: row.source for row in findings}
        assert sources["conv1/conv2d"].startswith("models.py:")
        assert sources["x"] == ""


@pytest.mark.parametrize("kind", ["model", "capture", "program", "graph", "prepared", "pair"])
def test_every_rule_runs_on_everything_that_can_be_checked(kind: str) -> None:
    """No rule may fail where something is missing, and no rule changes what it looks at."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    model, example = residual(), images()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture = pt2qa.capture(model, example)
    program = torch.export.export(model, (example,))
    plugin = available()["x86"]
    subject = {
        "model": lambda: model,
        "capture": lambda: capture,
        "program": lambda: program,
        "graph": lambda: program.module(),
        "prepared": lambda: prepare_pt2e(capture.module(), plugin.build(capture.module(), qat=False)),
        "pair": lambda: residual_pair("x86"),
    }[kind]()
    args = (example,) if kind == "model" else None
    batches = [images()] if kind == "pair" else None
    findings = pt2qa.check(subject, args, quantizer="x86", batches=batches, progress=False)
    assert [one.rule for one in findings.rules][: len(RULES)] == list(RULES)
    assert findings.model in ("Residual", f"the {kind}")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_is_found_in_exported_graphs_too() -> None:
    model = in_training().eval()
    model[1].train()
    program = torch.export.export(model, (torch.zeros(2, 4),))
    assert [row.why for row in pt2qa.check(program, rules=["train-mode"])] == ["dropout was exported in training mode"]
    assert train_mode.id in RULES


def test_the_cpu_is_this_machine_or_the_one_that_is_named() -> None:
    assert cpu_features("no-vnni") == {"avx2"}
    assert cpu_features({"AVX512_VNNI"}) == {"avx512_vnni"}
    assert cpu_features(None)
    with pytest.raises(pt2qa.SelectionError, match="cpu: got 'old', expected 'vnni', 'no-vnni', or the features"):
        cpu_features("old")


def test_a_model_with_keyword_inputs_and_dynamic_shapes() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
            return x * factor

    shapes = {"x": {0: torch.export.Dim("batch")}, "factor": None}
    findings = pt2qa.check(Scale().eval(), (torch.ones(2, 3),), kwargs={"factor": torch.ones(3)}, dynamic_shapes=shapes)
    assert findings.error_count == 0
    assert findings.environment.fingerprint


def test_a_rule_that_stumbles_does_not_cost_the_findings_of_the_others(only) -> None:  # type: ignore[no-untyped-def]
    def stumbles(context: CheckContext) -> list[Found]:
        raise KeyError("nothing of that name")

    only(rule("broken", find=stumbles), rule("fine", find=lambda context: [Found("x", "is there")]))
    findings = pt2qa.check(nn.Linear(2, 2))
    assert [row.rule for row in findings] == ["fine"]
    broken = next(one for one in findings.rules if one.rule == "broken")
    assert (broken.outcome, broken.reason) == ("failed", "KeyError: 'nothing of that name'")
    assert "Failed, please report it: broken" in str(findings)


def test_a_silence_that_names_no_finding_is_noted() -> None:
    findings = pt2qa.check(in_training(), rules=["train-mode"], silence=["train-mode:drop*"])
    assert findings.notes == ("silence: train-mode:drop* matches no finding",)


def test_a_graph_that_torch_fx_traced_is_a_model() -> None:
    traced = torch.fx.symbolic_trace(in_training())
    assert [row.name for row in pt2qa.check(traced, rules=["train-mode"])] == ["1", "2.0"]


def test_what_does_not_belong_together_is_refused() -> None:
    pair = residual_pair("x86")
    with pytest.raises(pt2qa.SelectionError, match=r"got a converted graph, expected .*pt2qa\.pair\(float_graph"):
        pt2qa.check(pair.quantized)
    with pytest.raises(pt2qa.SelectionError, match=r"model: it lacks the capture's parameter 'conv1\.weight'"):
        pt2qa.check(pair, model=nn.Linear(2, 2))
    with pytest.raises(pt2qa.SelectionError, match="model: got int"):
        pt2qa.check(pair, model=3)  # type: ignore[arg-type]
    with pytest.raises(pt2qa.BatchError, match="batches is of type int; expected an iterable"):
        pt2qa.check(pair, batches=3)  # type: ignore[arg-type]
    with pytest.raises(pt2qa.BatchError, match="no batch to compare on"):
        pt2qa.check(pair, batches=[])


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_dynamic_sizes_stay_dynamic(quantizer: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    x = torch.randn(4, 3, 8, 8)
    capture = pt2qa.capture(model, x, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    pair = pt2qa.quantize(capture, quantizer, [x], progress=False)
    pt2qa.check(pair, batches=[x], progress=False)
    assert pt2qa.compare_layers(pair, [x, x[:3], x[:1]], progress=False).samples == 8
