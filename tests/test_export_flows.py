"""pt2qa beside flows that it does not run: ExecuTorch's export sessions, and torchao with Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType as Xnnpack
from executorch.export import ExportRecipe, ExportSession, StageType
from executorch.export.stages import PipelineArtifact, SourceTransformStage
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa import CaptureError, Edit, OverridePlan, SelectionError
from tests.models import randomize_batch_norms

QUANTIZED = [
    Xnnpack.PT2E_INT8_STATIC_PER_CHANNEL,
    Xnnpack.PT2E_INT8_STATIC_PER_TENSOR,
    Xnnpack.PT2E_INT8_DYNAMIC_PER_CHANNEL,
]
"""Every recipe of the XNNPACK backend that quantizes with PT2E."""

UNTIL_EXPORT = [StageType.SOURCE_TRANSFORM, StageType.QUANTIZE, StageType.TORCH_EXPORT]


class Cnn(nn.Module):
    """Convolutions with a batch norm and a ReLU6, mean, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6()
        self.last, self.fc = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.last(self.act(self.bn(self.conv(3 * x)))).mean((2, 3)))
        return result


class Attention(nn.Module):
    """One head written out, between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 4, -1)
        result: Tensor = self.fc(torch.relu(self.out(self.norm(scores @ self.v(x) + x))))
        return result


class WithHandles(SourceTransformStage):  # type: ignore[misc]  # executorch has no type information
    """Exports the float models and gives their ops handles: the hook of docs/export_flows.md."""

    def run(self, artifact: PipelineArtifact) -> None:
        super().run(artifact)
        inputs = artifact.get_context("example_inputs")
        graphs = {
            name: pt2qa.with_handles(torch.export.export(model, inputs[name][0])).module()
            for name, model in self._artifact.data.items()
        }
        self._artifact = artifact.copy_with_new_data(graphs)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (Cnn, (2, 3, 8, 8)),
    "attention": (Attention, (2, 6, 16)),
}
Batches = list[tuple[Tensor, ...]]


@functools.cache
def model_and_batches(name: str) -> tuple[nn.Module, Batches]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return randomize_batch_norms(make()), [(torch.randn(shape),) for _ in range(3)]


def finished(
    model: Any,
    batches: Any,
    kind: Xnnpack = QUANTIZED[0],
    *,
    quantizer: Any = None,
    stage: bool = True,
    stages: list[StageType] | None = None,
) -> ExportSession:
    """A session that has run, with the recipe's quantizer or another."""
    recipe = ExportRecipe.get_recipe(kind)
    recipe.pipeline_stages = stages
    if quantizer is not None:
        recipe.quantization_recipe.quantizers = [quantizer]
    session = ExportSession(model, batches, recipe)
    if stage:
        session.register_stage(StageType.SOURCE_TRANSFORM, WithHandles(recipe.quantization_recipe))
    session.export()
    return session


@functools.cache
def without_pt2qa() -> ExportSession:
    return finished(*model_and_batches("cnn"), stage=False)


def graphs_of(session: ExportSession) -> tuple[GraphModule, GraphModule]:
    """Float and converted graph."""
    artifacts = session.get_stage_artifacts()
    return artifacts[StageType.SOURCE_TRANSFORM].data["forward"], artifacts[StageType.QUANTIZE].data["forward"]


# -- a pair from a finished session ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.value)
@pytest.mark.parametrize("name", MODELS)
def test_a_finished_session_gives_a_pair(name: str, kind: Xnnpack) -> None:
    model, batches = model_and_batches(name)
    session = finished(model, batches, kind, stages=UNTIL_EXPORT)
    reference, quantized = graphs_of(session)
    pair = pt2qa.pair(reference, quantized, quantizer=kind.value, model=name)
    assert [op.reason for op in pair.pairing.unpaired] == ["folded into conv/conv2d, which is compared after it"] * (
        name == "cnn"
    )
    report = pt2qa.compare_layers(pair, batches, progress=False)
    with torch.no_grad():
        eager, actual = (torch.cat([graph(*batch) for batch in batches]) for graph in (model, quantized))
    # The reference has its batch norms folded; the model has not.
    assert report.outputs[0].sqnr == pytest.approx(pt2qa.sqnr(eager, actual), abs=1e-3)
    assert all(row.name in {op.name for op in pair.names.values()} for row in report.rows)

    exported = pt2qa.pair(reference, session.get_exported_program())
    again = pt2qa.compare_layers(exported, batches, progress=False)
    assert [row.sqnr for row in again.outputs] == [row.sqnr for row in report.outputs]


def test_the_stage_does_not_change_what_is_deployed() -> None:
    with_handles = finished(*model_and_batches("cnn"))
    assert with_handles.get_pte_buffer() == without_pt2qa().get_pte_buffer()


def test_a_session_without_the_stage_pairs_too() -> None:
    """It exports the model for itself: module path, kind of op and ordinal say which op is which."""
    model, batches = model_and_batches("cnn")
    _, quantized = graphs_of(finished(model, batches, stage=False, stages=UNTIL_EXPORT))
    pairing = pt2qa.pair(torch.export.export(model, batches[0]), quantized).pairing
    reference, handled = graphs_of(finished(model, batches, stages=UNTIL_EXPORT))
    expected = pt2qa.pair(reference, handled).pairing
    assert [paired.name for paired in pairing.pairs] == [paired.name for paired in expected.pairs]
    assert pairing.unpaired == expected.unpaired


def test_several_methods_give_a_pair_each() -> None:
    given = {name: model_and_batches(name) for name in MODELS}
    models, batches = ({name: each[i] for name, each in given.items()} for i in (0, 1))
    artifacts = finished(models, batches, stages=UNTIL_EXPORT).get_stage_artifacts()
    for name in MODELS:
        both = (artifacts[stage].data[name] for stage in (StageType.SOURCE_TRANSFORM, StageType.QUANTIZE))
        assert pt2qa.compare_layers(pt2qa.pair(*both), batches[name], progress=False).outputs


# -- a plan in a recipe ------------------------------------------------------------------------------------------------

EDITS = {
    "float": Edit("float", ("last/conv2d", "mean")),
    "fuse": Edit("fuse", ("conv/conv2d", "act/hardtanh")),
    "dynamic": Edit("dynamic", ("fc/linear",)),
    "observer": Edit("observer", ("last/conv2d", "fc/linear"), "moving_average"),
}


@pytest.mark.parametrize("stage", [True, False], ids=["with handles", "plain"])
@pytest.mark.parametrize("kind", EDITS)
def test_a_plan_in_a_recipe_does_what_it_does_here(kind: str, stage: bool) -> None:
    model, batches = model_and_batches("cnn")
    plan = OverridePlan((EDITS[kind],))
    session = finished(model, batches, quantizer=plan.apply_to("xnnpack"), stage=stage, stages=UNTIL_EXPORT)
    captured = pt2qa.capture(model, batches[0])
    ours = pt2qa.quantize(captured, "xnnpack", batches, overrides=plan, progress=False).quantized
    theirs = session.get_stage_artifacts()[StageType.QUANTIZE].data["forward"]
    assert all(torch.equal(theirs(*batch), ours(*batch)) for batch in batches)
    plain = pt2qa.quantize(captured, "xnnpack", batches, progress=False).quantized
    assert not all(torch.equal(plain(*batch), ours(*batch)) for batch in batches)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.value)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_applied_to_a_recipes_own_quantizer(name: str, kind: Xnnpack) -> None:
    model, batches = model_and_batches(name)
    own = ExportRecipe.get_recipe(kind).quantization_recipe.quantizers[0]
    plan = OverridePlan((Edit("float", ("fc/linear",)),))
    session = finished(model, batches, kind, quantizer=plan.apply_to(own), stages=UNTIL_EXPORT)
    reference, quantized = graphs_of(session)
    pair = pt2qa.pair(reference, quantized)
    assert ("weight", "fc/linear") not in {(site.kind, site.name) for site in pair.sites}
    own = ExportRecipe.get_recipe(kind).quantization_recipe.quantizers[0]
    captured = pt2qa.capture(model, batches[0])
    ours = pt2qa.quantize(captured, own, batches, overrides=plan, progress=False).quantized
    assert all(torch.equal(quantized(*batch), ours(*batch)) for batch in batches)


@pytest.mark.filterwarnings("ignore:This API is experimental")  # executorch's runtime
def test_a_plan_is_deployed() -> None:
    model, batches = model_and_batches("cnn")
    session = finished(model, batches, quantizer=OverridePlan((EDITS["fuse"],)).apply_to("xnnpack"))
    reference, quantized = graphs_of(session)
    pair = pt2qa.pair(reference, quantized)
    step = max(
        site.params.largest_scale for site in pair.sites if site.name == "fc/linear" and site.kind == "activation"
    )
    (deployed,) = session.run_method("forward", batches[0])
    torch.testing.assert_close(deployed, quantized(*batches[0]), rtol=0, atol=1.01 * step)


def test_an_op_that_the_sessions_graph_does_not_have_is_named() -> None:
    quantizer = OverridePlan((Edit("float", ("fc/linaer",)),)).apply_to("xnnpack")
    with pytest.raises(SelectionError, match="the model has no op 'fc/linaer'; did you mean 'fc/linear'"):
        finished(*model_and_batches("cnn"), quantizer=quantizer, stages=UNTIL_EXPORT)


# -- a session for what pt2qa quantized --------------------------------------------------------------------------------


def test_a_session_deploys_what_pt2qa_quantized() -> None:
    """It is the same program as where the session quantizes."""
    model, batches = model_and_batches("cnn")
    pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches, progress=False)
    lowered = finished(pair.quantized, batches, stage=False)
    assert lowered.get_pte_buffer() == without_pt2qa().get_pte_buffer()


# -- torchao's quantize_ -----------------------------------------------------------------------------------------------


def test_a_recipe_that_transforms_the_source_is_paired_with_the_float_program() -> None:
    """torchao's ``quantize_`` replaces weights before export; nothing of it goes through PT2E."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    batches: Batches = [(torch.randn(4, 64),) for _ in range(2)]
    kind = Xnnpack.TORCHAO_INT8_DYNAMIC_ACT_INT4_WEIGHT_PER_TENSOR
    transformed, quantized = graphs_of(finished(model, batches, kind, stages=UNTIL_EXPORT))
    reference = pt2qa.with_handles(torch.export.export(model, batches[0]))
    pair = pt2qa.pair(reference, quantized)
    assert sorted((site.kind, site.params.dtype) for site in pair.sites) == 2 * [("activation", "int8")] + 2 * [
        ("weight", "int4")
    ]
    with torch.no_grad():
        eager, actual = (torch.cat([graph(*batch) for batch in batches]) for graph in (model, transformed))
    for report in (pt2qa.compare_layers(pair, batches), pt2qa.compare_graphs(reference, quantized, batches)):
        assert report.outputs[0].sqnr == pytest.approx(pt2qa.sqnr(eager, actual), abs=1e-6)


# -- torchao and Inductor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_flow_of_torchao_and_inductor_is_paired_beside_it(name: str) -> None:
    model, batches = model_and_batches(name)
    program = pt2qa.with_handles(torch.export.export(model, batches[0]))
    plan = OverridePlan((Edit("observer", ("fc/linear",), "minmax"),))
    prepared = prepare_pt2e(program.module(), plan.apply_to("x86"))
    for batch in batches:
        prepared(*batch)
    converted = convert_pt2e(prepared)
    pair = pt2qa.pair(program, converted, quantizer="x86")
    before = pt2qa.compare_layers(pair, batches, progress=False)
    with torch.no_grad():
        lowered = lower_pt2e_quantized_to_x86(converted, batches[0])
        eager, actual = (torch.cat([graph(*batch) for batch in batches]) for graph in (model, converted))
    assert before.outputs[0].sqnr == pytest.approx(pt2qa.sqnr(eager, actual), abs=1e-3)
    assert lowered is not converted
    # Lowering leaves the converted graph as it is, and with it the pair.
    after = pt2qa.compare_layers(pair, batches, progress=False)
    assert [row.sqnr for row in after.outputs] == [row.sqnr for row in before.outputs]

    captured = pt2qa.capture(model, batches[0])
    ours = pt2qa.quantize(captured, "x86", batches, overrides=plan, progress=False).quantized
    assert all(torch.equal(converted(*batch), ours(*batch)) for batch in batches)


# -- handles -----------------------------------------------------------------------------------------------------------


def test_handles_are_given_to_a_copy() -> None:
    model, batches = model_and_batches("cnn")
    program = torch.export.export(model, batches[0])
    numbered = pt2qa.with_handles(program)
    assert not any("custom" in node.meta for node in program.graph.nodes)
    assert [node.name for node in numbered.graph.nodes] == [node.name for node in program.graph.nodes]
    assert torch.equal(numbered.module()(*batches[0]), program.module()(*batches[0]))
    assert numbered.state_dict["conv.weight"] is program.state_dict["conv.weight"]


def test_only_exported_programs_take_handles() -> None:
    with pytest.raises(CaptureError, match="program is of type Cnn; expected the ExportedProgram of"):
        pt2qa.with_handles(model_and_batches("cnn")[0])  # type: ignore[arg-type]
