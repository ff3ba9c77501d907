"""An engine that computes something else than the graphs is refused, whichever engine it is (trap 42)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._candidates import analysis as quantizers
from pt2qa._sensitivity import gradients, site_groups
from pt2qa._simulator import fused, lockstep, verification
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import Graphs, Outputs, Verification, first_inexact_site, graph_outputs
from tests.flows import quantized_pair, residual_pair
from tests.models import Counter, images, residual


@pytest.fixture
def pair() -> pt2qa.QuantizedPair:
    return quantized_pair(residual(), images(), "xnnpack")


def layers(pair: pt2qa.QuantizedPair, batches: list[Tensor]) -> pt2qa.LayerReport:
    return pt2qa.compare_layers(pair, batches, progress=False)


def broken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Lets a method return something else."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(right(*args, **kwargs)))


def test_lockstep_with_another_quantized_value(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lockstep.Lockstep, "_op", lambda run: (run[0], run[1] * 1.1, run[2]))
    with pytest.raises(pt2qa.SimulationError, match=r"they differ in how they are run: op by op, both agree"):
        layers(pair, [images()])


def test_lockstep_with_another_reference_value(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lockstep.Lockstep._op

    def other(self: Any, step: Step) -> Any:
        reference, quantized, isolated = right(self, step)
        return (reference * 1.01 if step.op == "linear" else reference), quantized, isolated

    monkeypatch.setattr(lockstep.Lockstep, "_op", other)
    with pytest.raises(pt2qa.SimulationError, match=r"is not the reference graph: output has an SQNR of 40\.0 dB"):
        layers(pair, [images()])


def test_lockstep_with_another_isolated_value(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lockstep.Lockstep, "_run_isolated", lambda value: value * 1.01)
    with pytest.raises(pt2qa.SimulationError, match=r"the isolated error of .* has a squared sum of .*converted graph"):
        layers(pair, [images()])


@pytest.mark.parametrize(
    "later",
    [images(seed=1).to(memory_format=torch.channels_last), images(3)],
    ids=["another layout", "another shape"],
)
def test_lockstep_that_goes_wrong_on_a_later_batch_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, later: Tensor
) -> None:
    pair = quantized_pair(residual(), (images(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    right = lockstep.Lockstep.run

    def other(self: Any, values: Any, visit: Any) -> Any:
        reference, quantized = right(self, values, visit)
        first = values[0].shape == images().shape and values[0].is_contiguous()
        return reference, quantized if first else [quantized[0] + 1e-3]

    monkeypatch.setattr(lockstep.Lockstep, "run", other)
    layers(pair, [images(), images(seed=1)])
    with pytest.raises(pt2qa.SimulationError, match="op by op, both agree"):
        layers(pair, [images(), later])


def test_the_walk_of_bad_cases(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, Simulator, "run", lambda outputs: [value * 1.01 for value in outputs])
    with pytest.raises(pt2qa.SimulationError, match="op by op, both agree"):
        pt2qa.find_bad_cases(pair, [images()], progress=False)


def test_the_walks_of_compare_quantizers(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.capture is not None
    broken(monkeypatch, quantizers._Runner, "finish", lambda outputs: [value * 1.01 for value in outputs])
    with pytest.raises(pt2qa.SimulationError, match="op by op, both agree"):
        pt2qa.compare_quantizers(pair.capture, {"one": pair}, [images()], progress=False)


def test_the_site_whose_layout_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = quantized_pair(residual(), images(1), "xnnpack")
    picture = images()[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]
    assert first_inexact_site(pair.graphs, pair.values(picture)) is None
    monkeypatch.setattr(fused, "after_rounding", lambda x: x.stride())
    assert first_inexact_site(pair.graphs, pair.values(picture)) == (
        "at x the fused quantize op gives the strides (3, 1, 24, 3), the converted ops (192, 1, 24, 3)"
    )


def test_the_graphs_run_once_for_a_batch_that_several_analyses_see(
    pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[object] = []
    right = verification.graph_values
    monkeypatch.setattr(verification, "graph_values", lambda graph, *args: (runs.append(graph), right(graph, *args))[1])
    layers(pair, [images(seed=2), images(seed=1)])
    assert runs == [pair.quantized, pair.reference]
    layers(pair, [images(seed=2)])
    pt2qa.find_bad_cases(pair, [images(seed=2)], progress=False)
    assert runs == [pair.quantized, pair.reference]
    layers(pair, [images(seed=1)])
    assert runs == [pair.quantized, pair.reference] * 2
    layers(pair, [images()])  # on the first calibration batch, quantize ran the quantized graph
    assert runs == [pair.quantized, pair.reference] * 2 + [pair.reference]


@pytest.mark.parametrize(("kept", "runs"), [(1 << 24, 1), (0, 2)])
def test_what_the_reference_returned_is_kept_for_other_engines_if_it_is_small(
    pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch, kept: int, runs: int
) -> None:
    ran: list[object] = []
    right = verification.graph_values
    monkeypatch.setattr(verification, "graph_values", lambda graph, *args: (ran.append(graph), right(graph, *args))[1])
    monkeypatch.setattr(verification, "KEPT_BYTES", kept)
    values = pair.values(images(seed=3))
    (output,) = pair.simulator.run(values, on=False)
    for error in (0.0, 1e-6):
        Verification(pair.graphs).run(functools.partial(Outputs, [output * (1 + error)]), values)
    assert ran == [pair.reference] * runs


def test_inputs_and_buffers_stay_as_they_are_where_a_graph_writes_to_them() -> None:
    model = Counter()
    capture = pt2qa.capture(model.eval(), images())
    x = images()
    graph_outputs(capture.module(), [x])
    assert torch.equal(x, images())
    assert int(capture.module().calls) == int(model.calls)


class FirstOfFour(nn.Module):
    """Returns a column of a single row: one element, whose stride is four."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        column: Tensor = self.linear(x)[:, 0]
        return column


def test_an_output_of_one_element_of_a_row() -> None:
    x = torch.tensor([[0.5]])
    pair = pt2qa.quantize(pt2qa.capture(FirstOfFour().eval(), x), "xnnpack", [x], progress=False)
    assert pt2qa.compare_layers(pair, [x], progress=False).sqnr > 30


def test_integer_outputs_that_differ_are_refused() -> None:
    pair = quantized_pair(residual(), images(), "xnnpack")
    check = Verification(Graphs(pair.quantized, pair.reference, pair.simulator))
    with pytest.raises(pt2qa.SimulationError, match=r"output is int64\[2, 4\] instead of float32\[2, 4\]"):
        check.run(lambda: Outputs(reference=[torch.zeros(2, 4, dtype=torch.long)]), pair.values(images()))


def test_the_forked_walk_of_exact_sensitivity(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    right = site_groups._Walk._fork
    monkeypatch.setattr(
        site_groups._Walk, "_fork", lambda self, start, on: [value * 1.01 for value in right(self, start, on)]
    )
    with pytest.raises(pt2qa.SimulationError, match="op by op, both agree"):
        pt2qa.sensitivity(pair, [images()], method="exact", progress=False)


def test_the_gradient_run_of_projected_sensitivity(pair: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradients.GradientRun._forward

    def other(self: Any, step: Step) -> None:
        right(self, step)
        if step.op == "linear":
            self.env[step.out] = self.env[step.out] * 1.01

    monkeypatch.setattr(gradients.GradientRun, "_forward", other)
    with pytest.raises(pt2qa.SimulationError, match=r"is not the reference graph: output .* 40\.0 dB"):
        pt2qa.sensitivity(pair, [images()], method="projection", progress=False)


def in_training(model: nn.Module) -> pt2qa.QuantizedPair:
    """What plain torchao makes of a model in training mode, with the reference of the model in use."""
    data = images()
    graph = torch.export.export(model.train(), (data,)).module()
    prepared = prepare_pt2e(graph, pt2qa.quantizer("xnnpack").build(graph, qat=False))
    prepared(data)
    return pt2qa.pair(pt2qa.capture(model.eval(), data), convert_pt2e(prepared), quantizer="xnnpack")


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Dropout(0.5), "differ first at 2/dropout: it drops values at random, as in training mode.*Export"),
        (nn.BatchNorm2d(3, momentum=0.1), "They differ first at 2/batch_norm: it may use the statistics of the batch"),
    ],
    ids=["dropout", "batch norm"],
)
def test_an_op_that_was_exported_in_training_mode_is_named(layer: nn.Module, said: str) -> None:
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 2, 3)
    pair = in_training(nn.Sequential(first, nn.ReLU(), layer, last).requires_grad_(False))
    with pytest.raises(pt2qa.SimulationError, match=said):
        layers(pair, [images()])


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (nn.LayerNorm(8), nn.LayerNorm(8, eps=0.1), "eps is 1e-05 in the reference graph and 0.1 in the quantized one"),
        (nn.ReLU6(), nn.ReLU(), "type is hardtanh in the reference graph and relu in the quantized one"),
        (nn.Softmax(-1), nn.Softmax(0), "dim is -1 in the reference graph and 0 in the quantized one"),
    ],
    ids=["eps", "type", "axis"],
)
def test_what_an_op_is_given_in_another_model_is_said(own: nn.Module, other: nn.Module, said: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    first, last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8).requires_grad_(False)
    with torch.no_grad():
        first.weight *= 10
    quantized = quantized_pair(nn.Sequential(first, other, last), x).quantized
    with pytest.raises(pt2qa.SimulationError, match=f"They differ first at 1/[a-z_0-9]*: its {said}"):
        layers(
            pt2qa.pair(pt2qa.capture(nn.Sequential(first, own, last).eval(), x), quantized, quantizer="xnnpack"), [x]
        )


# -- what is compared when, and in which words -------------------------------------------------------------------------


def graphs_of(pair: pt2qa.QuantizedPair) -> Graphs:
    return Graphs(pair.quantized, pair.reference, Simulator(pair.program))


@pytest.fixture
def shared() -> pt2qa.QuantizedPair:
    return residual_pair()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that ran."""
    found: list[object] = []
    right = verification.graph_values
    monkeypatch.setattr(verification, "graph_values", lambda graph, *a: (found.append(graph), right(graph, *a))[1])
    return found


def test_each_kind_of_batch_is_compared_once_and_each_side_with_its_graph(
    shared: pt2qa.QuantizedPair, ran: list[object]
) -> None:
    graphs, first, second = graphs_of(shared), images(seed=5), images(seed=6)
    check = Verification(graphs)
    run = functools.partial(verification.simulated, graphs.simulator)
    assert check.accepts(run([first]), [first])
    assert ran == [shared.quantized, shared.reference]
    assert check.accepts(run([second]), [second]), "of the same kind"
    assert check.accepts(Outputs(), [first])
    assert len(ran) == 2
    later = Verification(graphs)
    assert later.accepts(run([first]), [first]), "known of another analysis"
    assert len(ran) == 2
    apart = [second.to(memory_format=torch.channels_last)]
    assert later.accepts(run([first], apart), [first], apart)
    assert ran[2:] == [shared.quantized]
    assert later.accepts(run([first], apart), [first], apart)
    assert later.accepts(Outputs(quantized=run([second]).quantized), apart)
    assert len(ran) == 3
    assert later.accepts(Outputs(reference=run(apart).reference), [second + 1])
    assert check.notes == later.notes == []


def test_what_the_quantized_graph_returned_need_not_be_computed_again(
    shared: pt2qa.QuantizedPair, ran: list[object]
) -> None:
    graphs, batch = graphs_of(shared), images(seed=5)
    with torch.no_grad():
        graphs.accept([batch], shared.quantized(batch))
    run = verification.simulated(graphs.simulator, [batch])
    assert Verification(graphs).accepts(Outputs(quantized=run.quantized), [batch])
    assert ran == []
    wrong = [value + 1 for value in run.quantized]
    with pytest.raises(pt2qa.SimulationError, match=r"op by op, both agree\. Its numbers would describe another model"):
        Verification(graphs).accepts(Outputs(quantized=wrong), [batch])


def test_a_fused_op_that_is_not_exact_gives_way_to_the_converted_ops(
    shared: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, batch = graphs_of(shared), images(seed=5)
    check = Verification(graphs)
    steps = [step for step in shared.program.steps if step.site is not None]
    right = steps[1].function
    monkeypatch.setattr(steps[1], "function", lambda x, *, out=None, stats=None: right(x) + 0.5)
    assert first_inexact_site(graphs, [batch]) == (
        f"at {steps[1].name} the fused quantize op gives other values than the converted ops"
    )
    result = check.run(functools.partial(verification.simulated, graphs.simulator, [batch]), [batch])
    assert not graphs.simulator.fused
    assert check.notes == [
        f"at {steps[1].name} the fused quantize op gives other values than the converted ops; the converted ops are "
        "used instead"
    ]
    with torch.no_grad():
        assert torch.equal(result.quantized[0], shared.quantized(batch))


def test_the_first_op_that_differs_is_named(shared: pt2qa.QuantizedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, batch = graphs_of(shared), images(seed=5)
    step = next(step for step in shared.program.steps if step.op == "mean")
    right = step.function
    monkeypatch.setattr(step, "function", lambda *args, **kwargs: right(*args, **kwargs) * 1.5)
    run = verification.simulated(graphs.simulator, [batch])
    with pytest.raises(pt2qa.SimulationError) as error:
        Verification(graphs).accepts(Outputs(quantized=run.quantized), [batch])
    assert str(error.value) == (
        "the simulator does not compute what the converted graph computes: they differ first at mean. "
        "Its numbers would describe another model, so none are reported. Please file a bug with the model."
    )
    with pytest.raises(pt2qa.SimulationError) as error:
        Verification(graphs).accepts(Outputs(reference=run.reference), [batch])
    assert " They differ first at mean. Either the two graphs were not made from one float graph" in str(error.value)
    assert str(error.value).endswith("or convert_pt2e changed the model.")


def test_buffers_that_are_written_are_named_with_the_difference() -> None:
    capture = pt2qa.capture(Counter().eval(), images())
    pair = pt2qa.quantize(capture, "xnnpack", [images()], progress=False)
    graphs = graphs_of(pair)
    wrong = [value * 1.5 for value in graphs.simulator.run([images()], on=False)]
    with pytest.raises(pt2qa.SimulationError) as error:
        Verification(graphs).accepts(Outputs(reference=wrong), [images()])
    assert str(error.value).endswith(
        " The forward writes to the buffers calls; convert_pt2e treats a buffer that is quantized as a constant."
    )


@pytest.mark.parametrize(("error", "refused"), [(0.9e-3, False), (1.1e-3, True)])
def test_the_reference_must_agree_to_sixty_decibels(shared: pt2qa.QuantizedPair, error: float, refused: bool) -> None:
    graphs, batch = graphs_of(shared), images(seed=5)
    (output,) = graphs.simulator.run([batch], on=False)
    run = Outputs(reference=[output * (1 + error)])
    if refused:
        with pytest.raises(pt2qa.SimulationError, match=r"output has an SQNR of 59\.\d dB instead of at least 60 dB"):
            Verification(graphs).accepts(run, [batch])
    else:
        assert Verification(graphs).accepts(run, [batch])


def test_an_argmax_may_flip_for_one_in_a_thousand() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).argmax(-1)  # type: ignore[no-any-return]

    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    pair = quantized_pair(Largest(), x)
    (output,) = pair.simulator.run([x], on=False)
    for count, refused in ((2, False), (3, True)):
        other = output.clone()
        other[:count] = 3 - other[:count]
        other[:count][other[:count] == output[:count]] += 1
        if refused:
            with pytest.raises(pt2qa.SimulationError, match=f"output differs in {count} of 2000 values"):
                Verification(graphs_of(pair)).accepts(Outputs(reference=[other]), [x])
        else:
            assert Verification(graphs_of(pair)).accepts(Outputs(reference=[other]), [x])


def test_sites_are_switched_with_the_biases_beside_their_weights(shared: pt2qa.QuantizedPair) -> None:
    simulator, values = Simulator(shared.program), [images(seed=5)]
    for constant in shared.program.constants:
        own = constant.site if constant.site is not None else constant.weight_site
        for on in (True, False, [], [own], {site.index for site in shared.sites} - {own}):
            read = simulator.environment(values, on)[constant.slot]
            quantized = on is True or (not isinstance(on, bool) and own in on)
            assert read is (constant.stored if quantized else constant.reference)


def test_a_value_that_is_sent_into_a_walk_takes_its_place(shared: pt2qa.QuantizedPair) -> None:
    simulator, values = Simulator(shared.program), [images(seed=5)]
    walk, sent = simulator.walk(values, False), None
    with torch.no_grad():
        while True:
            try:
                step, value = walk.send(sent)
            except StopIteration as end:
                (output,) = end.value
                break
            sent = value * 2 if step.op == "mean" else None
        (plain,) = simulator.run(values, on=False)
    bias = next(
        each.reference for each in shared.program.constants if each.reader == "fc/linear" and each.argument == 2
    )
    torch.testing.assert_close(output - bias, (plain - bias) * 2)
    assert output.shape == (2, 4)
