"""What is told of regions that need more bits, of the quantizer's configuration and of weights.

The sites of ``joined`` are in :mod:`tests.diagnosis.test_sites`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pt2qa._diagnosis.case import Case
from pt2qa._diagnosis.hypotheses import configuration, precision, weights
from pt2qa._sensitivity.roundings import fitted_weight, rounding
from pt2qa._simulator.program import QuantParams
from pt2qa._trials.treatment import Target, Treatment
from pt2qa.overrides.plan import OBSERVERS, Edit
from tests.diagnosis import facts
from tests.diagnosis.facts import Changed, joined, judged_by, played, said, seen, with_facts


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


MACS = {"a/linear": 2 / 7, "b/linear": 4 / 7, "c/linear": 1 / 7}


def macs(ops: Any) -> Any:
    return pytest.approx(sum(MACS.get(op, 0.0) for op in ops))


def needed(noise: dict[Any, float], case: Case | None = None, **given: Any) -> list[Any]:
    return list(precision.needed(with_facts(case or joined("xnnpack"), noise, seen={}, **given)))


def test_the_noisiest_regions_are_kept_in_float_alone_and_together() -> None:
    """Of sites 0, 4 and 8; the region of a linear frees its input's, its weight's and its output's site."""
    noise = {0: 0.25, 1: 0.05, 7: 0.1, 8: 0.35, 3: 0.1, 6: 0.15}
    third, first, *rest = needed(noise)
    for found, (op, share), worst in ((third, ("c/linear", 0.6), "c/linear"), (first, ("a/linear", 0.3), "x")):
        others = found.others
        assert op in others
        assert said(found) == {
            "cause": "precision",
            "name": worst,
            "others": others,
            "evidence": f"accounts for {100 * share:.2f} % of the noise of all sites (error budget)",
            "remedy": f"keep these ops in float: {', '.join(others)}",
            "cost": macs(others),
        }
        assert found.treatment == Treatment(floats=(Edit("float", others),))
    (together,) = rest
    assert said(together) == {
        "cause": "precision",
        "name": "c/linear",
        "others": ("c/linear", "x", "slice_1", "c/linear", "a/linear"),
        "evidence": "75.00 % of the noise of all sites comes from 3 sites (error budget)",
        "remedy": "keep these ops in float: c/linear, a/linear",
        "cost": macs(["c/linear", "a/linear"]),
        "share": pytest.approx(0.75),
    }
    assert together.treatment == Treatment(floats=(Edit("float", ("c/linear", "a/linear")),))


def test_a_fifth_of_the_noise_is_tried_and_less_only_with_a_target() -> None:
    noise = {8: 0.74, 0: 0.2, 3: 0.06}
    assert [each.name for each in needed(noise)][:2] == ["c/linear", "x"]
    less = {8: 0.75, 0: 0.19, 3: 0.06}
    assert [each.name for each in needed(less)][:2] == ["c/linear", "c/linear"]  # the second is of both
    aimed = judged_by(joined("xnnpack"), target=Target(30.0))
    assert [each.name for each in needed(less, aimed)][:2] == ["c/linear", "x"]


def test_no_more_than_three_regions_and_not_all_noise() -> None:
    four = {0: 0.25, 4: 0.25, 5: 0.0, 3: 0.01, 8: 0.26, 1: 0.02}
    aimed = judged_by(joined("xnnpack"), target=Target(30.0))
    alone = [each for each in needed(four, aimed) if "accounts for" in each.evidence]
    assert len(alone) == precision.MOST == 3
    assert needed({}) == needed({8: 0.0}) == []
    assert needed({8: 0.5, 0: 0.5}, annotations=None) == []


def test_noise_of_values_that_calibration_did_not_see_is_its_fault() -> None:
    case = joined("xnnpack")
    ranges = {0: seen((-9.0, 9.0)), 8: seen((-9.0, 9.0))}
    shown = {0: seen((-1.0, 1.0)), 8: seen((-9.0, 9.0))}
    noise = {0: 0.3, (0, "activation clamping"): 0.16, 8: 0.4, (8, "activation clamping"): 0.4, 1: 0.25}
    made = with_facts(case, noise, ranges=ranges, seen=shown)
    assert [precision._is_clamped(made, site) for site in (0, 8, 1)] == [True, True, False]
    half = with_facts(case, {**noise, (0, "activation clamping"): 0.15}, ranges=ranges, seen=shown)
    assert not precision._is_clamped(half, 0)
    assert not precision._is_clamped(with_facts(case, noise, ranges=ranges, seen={}), 0)
    causes = {sites: precision._cause(made, sites) for sites in ((0,), (8,), (1,), (0, 1), (0, 8), (0, 1, 8))}
    assert causes == {
        (0,): "narrow-calibration",
        (8,): "",  # calibration saw such values
        (1,): "precision",
        (0, 1): "narrow-calibration",
        (0, 8): "",
        (0, 1, 8): "",
    }
    found = list(precision.needed(made))
    assert {each.cause for each in found} == {"narrow-calibration"}
    alone, together = precision.needed(made, clamped=True)  # once all else was tried
    for each in (alone, together):
        assert (each.cause, each.name, each.sentence) == ("precision", "c/linear", precision.CLAMPED)
    assert alone.treatment == Treatment(floats=(Edit("float", ("c/linear",)),))
    assert set(together.treatment.floats[0].ops) == {"a/linear", "c/linear"}
    seen_by_none = with_facts(case, {0: 0.3, (0, "activation clamping"): 0.3, 8: 0.1}, ranges=ranges, seen=shown)
    assert list(precision.needed(seen_by_none, clamped=True)) == []
    both = with_facts(
        case,
        {0: 0.3, (0, "activation clamping"): 0.3, 8: 0.3, (8, "activation clamping"): 0.3, 3: 0.4},
        ranges=ranges,
        seen={0: shown[0], 8: shown[0]},
    )
    *_, last = precision.needed(both)
    assert last.cause == "narrow-calibration"
    assert last.others == ("x", "c/linear", "a/linear", "c/linear")
    assert last.evidence.startswith("60.00 % of the noise of all sites comes from 2 sites")


def nested(case: Case, *indices: int) -> Case:
    """The same with some sites in a nested graph."""
    sites = tuple(replace(site, nested=site.index in indices, source=99) for site in case.pair.sites)
    return Case(Changed(case.pair, sites=sites), case.judge, case.data, case.now)  # type: ignore[arg-type]


def test_a_nested_graph_is_kept_in_float_by_the_quantizer() -> None:
    case = nested(joined("xnnpack"), 2, 3)
    (found,) = precision._nested(with_facts(case, {2: 0.1, 3: 0.11, 8: 0.79}, seen={}))
    assert said(found) == {
        "cause": "precision",
        "name": "b/linear",
        "others": ("relu", "b/linear"),
        "evidence": "its nested graph accounts for 21.00 % of the noise of all sites (error budget)",
        "remedy": "keep the nested graph in float: make the quantizer annotate nothing in it, since plans "
        "do not reach nested graphs",
        "share": pytest.approx(0.21),
    }
    assert found.treatment == Treatment(exact=frozenset({case.places[2], case.places[3]}))
    assert list(precision._nested(with_facts(case, {2: 0.1, 3: 0.1, 8: 0.8}, seen={}))) == []


def test_pairs_of_ops_that_are_not_fused_are_one_plan() -> None:
    case = joined("xnnpack")
    edits = (Edit("fuse", ("b/linear", "cat")), Edit("fuse", ("relu", "cat")))
    made = with_facts(case, {2: 0.3, 4: 0.1, 3: 0.2, 8: 0.4}, fusions=edits)
    (found,) = configuration.unfused(made)
    assert said(found) == {
        "cause": "unfused-activation",
        "name": "relu",
        "others": ("relu", "b/linear"),
        "evidence": "2 pairs of ops quantized separately; the values in between account for 40.00 % of the noise of "
        "all sites (error budget)",
        "remedy": "fuse them: 2 edits in the plan",
    }
    assert found.treatment == Treatment(edits=edits)
    (silent,) = configuration.unfused(with_facts(case, {}, fusions=(Edit("fuse", ("slice2", "cat")),)))
    assert (silent.name, silent.others) == ("slice2", ())
    assert "account for 0.00 %" in silent.evidence
    assert list(configuration.unfused(with_facts(case, {}, fusions=()))) == []


def test_what_is_rounded_before_an_activation_is_advice() -> None:
    case = joined("plain")
    made = with_facts(case, {3: 0.4}, fusions=(Edit("fuse", ("b/linear", "cat")),))
    assert made.needless == (3,)
    (found,) = configuration.rounded_before(made)
    assert said(found) == {
        "cause": "unfused-activation",
        "name": "a/linear",
        "others": ("a/linear", "relu"),
        "evidence": "1 op quantized before the activation that alone reads it; here relu",
        "remedy": "annotate the two ops as one pattern: no output_qspec on the first",
    }
    assert found.treatment == Treatment(exact=frozenset({case.places[3]}))
    made.needless = (3, 7)
    made.known_noises = facts.noises({3: 0.4, 7: 0.5})
    (both,) = configuration.rounded_before(made)
    assert (both.name, both.others) == ("a/linear", ("a/linear", "relu"))  # the other is fused by an edit
    made.fusions = ()
    (both,) = configuration.rounded_before(made)
    assert (both.name, both.others[:2]) == ("b/linear", ("a/linear", "b/linear"))
    assert both.evidence.startswith("2 ops quantized before the activation")
    fused = with_facts(case, {}, fusions=(Edit("fuse", ("a/linear", "relu")),))
    assert list(configuration.rounded_before(fused)) == []


def test_dynamic_scales_by_row_are_those_of_the_kernels() -> None:
    case = joined("xnnpack:mode=dynamic")
    dynamic = [site.index for site in case.pair.sites if site.params.dynamic]
    noise = {index: float(index == dynamic[1]) for index in dynamic}
    (found,) = configuration.dynamic_by_row(with_facts(case, noise))
    assert said(found) == {
        "cause": "dynamic-by-row",
        "name": case.pair.sites[dynamic[1]].name,
        "evidence": f"{len(dynamic)} dynamic scales, which the kernels compute per row",
        "remedy": "none needed: on the device the model is better than the converted graph; analyse pair.as_deployed()",
    }
    assert found.treatment == Treatment(as_deployed=True)
    assert list(configuration.dynamic_by_row(joined("xnnpack"))) == []
    foreign = Case(Changed(case.pair, recipe=None), case.judge, case.data, case.now)  # type: ignore[arg-type]
    assert list(configuration.dynamic_by_row(foreign)) == []


def test_other_observers_are_one_edit_each() -> None:
    case = joined("xnnpack")
    made = with_facts(case, {8: 0.6, 0: 0.3, 1: 0.5})
    found = list(configuration.observers(made))
    edits = [edit for each in found for edit in each.treatment.edits]
    assert {edit.observer for edit in edits} <= set(OBSERVERS)
    assert {edit.observer for edit in edits} >= {"minmax", "moving_average"}
    for each, edit in zip(found, edits, strict=True):
        name = OBSERVERS[edit.observer]
        assert said(each) == {
            "cause": "observer",
            "name": "c/linear",
            "evidence": "activations account for most of the noise (error budget)",
            "remedy": f"observe activations with {name}: one edit in the plan",
            "sentence": f"{name} chooses better ranges from the same data",
        }
        assert each.treatment == Treatment(edits=(edit,))
    assert {each.name for each in configuration.observers(with_facts(case, {}))} == {""}
    assert list(configuration.observers(with_facts(case, annotations=None))) == []


def coarse(case: Case, index: int, bits: int, axis: int | None = 0) -> Case:
    """The same case with a weight that has few integers."""
    reference = case.constants[index].reference.detach()
    if axis is None:
        scale: Any = float(reference.abs().max()) / (2 ** (bits - 1) - 1)
        zero: Any = 0
    else:
        scale = reference.abs().amax(1) / (2 ** (bits - 1) - 1)
        zero = torch.zeros(len(scale), dtype=torch.int64)
    most = 2 ** (bits - 1) - 1
    params = {"scale": scale, "zero_point": zero, "quant_min": -most, "quant_max": most, "axis": axis}
    made = facts.with_params(case, {index: params})
    site = made.pair.sites[index]
    quantized = rounding(site.params)(reference.clone())
    constant = Changed(case.constants[index], reference=reference, quantized=quantized, by_rows=quantized)
    made.constants = {**case.constants, index: constant}  # type: ignore[dict-item]
    return made


def with_constants(case: Case, noise: Any, **given: Any) -> Case:
    own = {"constants": case.constants, **given}
    return with_facts(case, noise, **own)


def test_coarse_weights_are_told_with_their_channels() -> None:
    case = coarse(joined("xnnpack"), 3, 4)
    reference = case.constants[3].reference
    made = with_constants(case, {3: 0.5, (3, "fitted"): 0.1})
    (found,) = weights.coarse(made)
    largest = reference.abs().amax(1)
    noise = (reference.double() - case.constants[3].quantized.double()).square().sum()
    sqnr = 10 * torch.log10(reference.double().square().sum() / noise)
    assert said(found) == {
        "cause": "weight-scheme",
        "name": "b/linear",
        "others": ("b/linear",),
        "evidence": "1 weight, here int8 -7..7 per channel of axis 0, with 5 times the noise of int8 per output "
        f"channel (error budget); its channels reach {largest.min():.4g} to {largest.max():.4g}, channel "
        f"{int(largest.argmax())} most, and its SQNR is {float(sqnr):.4g} dB",
        "remedy": "annotate these weights as int8, symmetric, -127..127, one scale per output channel "
        "(int8_weight: b/linear)",
    }
    assert found.preview is not None
    value = reference.clone()
    expected = rounding(fitted_weight(reference, 0))(value.clone())
    ((where, own),) = found.preview.played
    assert where == case.places[3]
    assert torch.equal(own.value(value), expected)
    # With seven bits, a fourth of the steps is lost, not half of them; but integers are left out.
    seven = coarse(joined("xnnpack"), 3, 7)
    assert [each.cause for each in weights.coarse(with_constants(seven, {3: 0.5, (3, "fitted"): 0.1}))] == [
        "weight-scheme"
    ]
    asked = with_constants(seven, {3: 0.5, (3, "fitted"): 0.1}, options={"reduce_range": True})
    ratio = _ratio(seven, 3)
    assert bool(list(weights.coarse(asked))) == (ratio > 4.0)


def _ratio(case: Case, index: int) -> float:
    """How many times the squared error of int8 by channel a weight has."""
    constant = case.constants[index]
    best = rounding(fitted_weight(constant.reference, 0))(constant.reference.clone())
    errors = [(constant.reference.double() - each.double()).square().sum() for each in (constant.by_rows, best)]
    return float(errors[0] / errors[1])


def test_one_scale_for_all_channels_is_an_option_where_the_quantizer_has_it() -> None:
    case = coarse(joined("xnnpack"), 3, 5, None)
    noise = {3: 0.5, (3, "fitted"): 0.0}
    (found,) = weights.coarse(with_constants(case, noise))
    assert found.cause == "per-tensor-weights"
    assert "here int8 -15..15 per tensor, with" in found.evidence
    (by_option,) = weights.coarse(with_constants(case, noise, options={"per_channel": False}))
    assert by_option.remedy == "quantize with per_channel=true"
    assert by_option.treatment == Treatment(options=(("per_channel", True),))
    (other,) = weights.coarse(with_constants(case, noise, options={"per_channel": True}))
    assert other.remedy == found.remedy


def test_another_weight_is_no_coarse_one() -> None:
    case = coarse(joined("xnnpack"), 3, 4)
    noise = {3: 0.5, (3, "fitted"): 0.1}
    constant: Any = case.constants[3]
    step = float(case.pair.sites[3].params.scale[0])  # type: ignore[index]
    other = constant.quantized.clone()
    assert weights.changed(case) == {}
    for steps, found in ((1.4, {}), (2.0, {3})):
        other[0] = constant.reference[0] + steps * step
        changed = Changed(constant, quantized=other, by_rows=other)
        made = with_constants(case, noise, constants={**case.constants, 3: changed})
        assert weights.changed(made).keys() == set(found)
        assert bool(list(weights.coarse(made))) == (not found)
        if found:
            # Some of its weights are at the ends of the range and beyond.
            assert weights.changed(made)[3] == pytest.approx(2.0, rel=1e-3)


def test_biases_in_few_bits_are_told_with_their_scale() -> None:
    params = {"dtype": "int16", "scale": 0.25}
    case = facts.with_params(joined("plain"), {2: params, 6: {**params, "scale": 0.5}})
    made = with_facts(case, {2: 0.1, 6: 0.2})
    (found,) = weights.biases(made)
    assert said(found) == {
        "cause": "weight-scheme",
        "name": "b/linear",
        "others": ("a/linear", "b/linear"),
        "evidence": "2 biases quantized to int16 with scale 0.5",
        "remedy": "keep biases in float, or int32 with a derived scale: scale of the input times scale of the weight",
        "sentence": "biases are quantized more coarsely than the accumulators that they are added to",
    }
    assert found.treatment == Treatment(exact=frozenset({case.places[2], case.places[6]}))
    assert list(weights.biases(with_facts(joined("plain")))) == []


def zeros(case: Case, silent: dict[int, float], large: float = 9.0) -> list[Any]:
    """Weights of input channels of these sizes: ``large`` there, and 1 at most elsewhere."""
    sizes = torch.ones(16)
    for channel, size in silent.items():
        sizes[channel] = size
    reference = torch.linspace(-1, 1, 16).repeat(16, 1).T.contiguous()
    for channel in silent:
        reference[1, channel] = -large
    constant = Changed(case.constants[3], reference=reference)
    ranges = {index: seen((-1.0, 1.0)) for index in (0, 2, 4, 5, 6, 8)}
    ranges[2] = seen((-1.0, 1.0), channels=((-sizes / 2).tolist(), sizes.tolist()))
    return list(weights.unread(with_facts(case, ranges=ranges, constants={**case.constants, 3: constant})))


def test_weights_of_channels_that_are_always_zero() -> None:
    case = joined("xnnpack")
    (found,) = zeros(case, {3: 0.0, 5: 1e-4})
    assert said(found) == {
        "cause": "outlier-channel",
        "name": "b/linear",
        "evidence": "2 input channels are always zero, and the weights there reach 9, all others 1",
        "remedy": "set these weights to 0 in the model: weight[:, channels] = 0",
        "sentence": "huge weights of channels that are always zero dominate the range",
    }
    value = torch.full((16, 16), 0.5)
    (rows,) = played(found.treatment, value).values()
    assert torch.tensor(rows)[:, [3, 5]].abs().sum() == 0
    assert rows[0][0] == pytest.approx(0.5, abs=1 / 127)
    assert value.min() == 0.5
    (one,) = zeros(case, {3: 0.0})
    assert one.evidence.startswith("1 input channel is always zero")
    assert zeros(case, {3: 2e-4}) == []
    assert zeros(case, {3: 0.0}, large=3.9) == []  # less than two bits
    assert len(zeros(case, {3: 0.0}, large=4.1)) == 1
    assert zeros(case, {}) == []
    assert zeros(case, dict.fromkeys(range(16), 0.0)) == []


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_steps_are_those_of_each_channel(axis: int | None) -> None:
    reference = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    scale: Any = 0.5 if axis is None else torch.tensor([0.5, 1.0])
    zero: Any = 0 if axis is None else torch.tensor([0, 0])
    site: Any = Changed(None, params=QuantParams("int8", scale, zero, -127, 127, axis))
    for row in range(2):
        for column in range(2):
            other = reference.clone()
            other[row, column] += 3.0
            own = 0.5 if axis is None else [0.5, 1.0][(row, column)[axis]]
            assert weights._steps_apart(site, reference, other) == pytest.approx(3.0 / own)
    empty = torch.zeros(0, 2)
    assert weights._steps_apart(Changed(None, params=QuantParams("int8", 0.5, 0, -127, 127)), empty, empty) == 0.0  # type: ignore[arg-type]
