"""What rows are about: every field of every place, of single sites, regions and modules, from the pair itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import pt2qa
from pt2qa._sensitivity.ledger import Place
from pt2qa._sensitivity.site_groups import SiteGroup, find_site_groups
from tests.flows import quantized_pair, residual_pair
from tests.models import Linears


def home_of(pair: pt2qa.QuantizedPair, site: Any) -> Any:
    """The step that makes a value or reads a weight; None of a model input."""
    named = [step for step in pair.program.steps if step.site is None and step.name == site.name]
    return named[0] if named else None


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_place_is_a_site_of_the_op_that_makes_it_or_reads_it(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    regions = {name: region.index for region in pair.regions for name in region.ops}
    found = find_site_groups(pair.program, None)
    assert [place.site for place in found] == [site.index for site in pair.sites]
    for place, site in zip(found, pair.sites, strict=True):
        home = home_of(pair, site)
        assert (place.name, place.op, place.dtype, place.handle) == (site.name, site.op, site.params.dtype, site.handle)
        assert place.kind == ("activation" if site.kind == "activation" else "weight")
        assert place.sites == (site.index,)
        assert place.module == ("" if home is None else pair.names[site.handle].module)
        assert place.region == (-1 if home is None else regions[site.name])
        assert place.steps == (frozenset() if home is None else {home.index})


@pytest.mark.parametrize("group", ["region", "module"])
def test_a_group_has_what_its_sites_have_together(group: Any) -> None:
    pair = residual_pair("x86")
    single = find_site_groups(pair.program, None)
    found = find_site_groups(pair.program, group)
    covered = [site for place in found for site in place.sites]
    assert sorted(covered) == [site.index for site in pair.sites]
    assert [min(place.sites) for place in found] == sorted(min(place.sites) for place in found)
    for place in found:
        own = [each for each in single if each.site in place.sites]
        assert place.site == -1
        assert place.sites == tuple(sorted(place.sites))
        assert place.kind == ("activation" if any(each.kind == "activation" for each in own) else "weight")
        assert place.dtype == ", ".join(dict.fromkeys(each.dtype for each in own))
        assert place.steps == frozenset(step for each in own for step in each.steps)
        if not place.steps:
            assert (place.name, place.op, place.region, place.module) == ("x", "input", -1, "")
        elif group == "region":
            region = pair.regions[place.region]
            first = next(step for step in pair.program.steps if step.name == region.ops[0])
            assert {each.region for each in own} == {place.region}
            assert (place.name, place.op) == (region.name, first.op)
            assert (place.handle, place.module) == (first.handle, first.module)
        else:
            assert len({each.module for each in own}) == 1
            assert (place.name, place.module) == (own[0].module or "(top level)", own[0].module)
            assert (place.handle, place.region) == (-1, -1)
    if group == "module":
        ops = {place.name: place.op for place in found}
        assert {"conv1": "Conv2d", "conv2": "Conv2d", "fc": "Linear"}.items() <= ops.items()
        assert len([place for place in found if place.name == "x"]) == 1


def test_the_share_of_the_flops_is_that_of_the_steps() -> None:
    place = SiteGroup("a", steps=frozenset({1, 3}))
    assert place.place({1: 6.0, 2: 10.0, 3: 4.0}) == Place("a", flops=10.0, flops_share=0.5)
    assert place.place({2: 10.0}) == Place("a", flops=0.0, flops_share=0.0)
    assert place.place({}) == Place("a", flops=0.0, flops_share=0.0)


def test_a_group_that_is_none_is_refused() -> None:
    for wrong in ("site", "op", ""):
        with pytest.raises(pt2qa.SelectionError, match=r"cannot group by .*; expected one of region, module, or None"):
            find_site_groups(residual_pair().program, wrong)  # type: ignore[arg-type]


# -- what the analysis says --------------------------------------------------------------------------------------------


@functools.cache
def linears() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Linears(), (torch.randn(4, 16),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def measured(batches: list[torch.Tensor], **options: Any) -> pt2qa.SensitivityReport:
    return pt2qa.sensitivity(linears(), batches, progress=False, **options)


def test_a_report_has_the_fields_of_its_run() -> None:
    batches = [torch.randn(4, 16), torch.randn(3, 16)]
    pair = linears()
    for method, projections in (("exact", 0), ("projection", 2)):
        options = {} if method == "exact" else {"projections": projections}
        report = measured(batches, method=method, **options)
        assert (report.method, report.metric, report.worst_is, report.group) == (method, "sqnr", "smallest", "site")
        assert (report.batches, report.samples, report.planned) == (2, 7, len(pair.sites))
        assert (report.projections, report.outputs) == (projections, ("output",))
        assert (report.quantizer, report.model) == (pair.quantizer, pair.model)
        with torch.no_grad():
            pairs = [(pair.reference(batch).double(), pair.quantized(batch).double()) for batch in batches]
        signal = sum(float(ref.square().sum()) for ref, _ in pairs)
        noise = sum(float((ref - quant).square().sum()) for ref, quant in pairs)
        assert (report.signal, report.noise) == (pytest.approx(signal), pytest.approx(noise))
        assert report.value == report.measured_sqnr
        assert [batch.samples for batch in report.data] == [4, 3]
        assert [batch.projections for batch in report.data] == [projections] * 2
        assert [batch.signal for batch in report.data] == [pytest.approx(float(ref.square().sum())) for ref, _ in pairs]
        assert not report.set_apart
        assert {entry.name for entry in report.input_ranges} == {"x"}
        assert report.input_ranges == pt2qa.compare_layers(pair, batches, progress=False).input_ranges


def test_a_batch_that_was_measured_is_not_measured_again() -> None:
    batches = [torch.randn(4, 16) for _ in range(2)]
    called: list[int] = []

    def metric(reference: torch.Tensor, quantized: torch.Tensor) -> float:
        called.append(len(called))
        return float((reference - quantized).abs().max())

    first = measured(batches[:1], method="exact", metric=metric)
    alone = len(called)
    assert alone == len(linears().sites) + 1
    called.clear()
    both = measured(batches, method="exact", metric=metric, resume=first)
    # The whole model of the first batch is held against the report, and that of no other.
    assert len(called) == alone + 1
    assert both.rows == measured(batches, method="exact", metric=metric).rows
    assert (both.batches, both.samples) == (2, 8)


def test_what_does_not_fit_the_report_to_resume_is_refused() -> None:
    batches = [torch.randn(4, 16) for _ in range(2)]
    report = measured(batches, method="exact")
    with pytest.raises(pt2qa.SelectionError, match="batch 0 is not that of the report to resume"):
        measured(batches[1:], method="exact", resume=report)
    for options, says in (
        ({"metric": "l1"}, "the report has metric 'sqnr', this call 'l1'"),
        ({"group": "module"}, "the report has group 'site', this call 'module'"),
        ({"method": "projection"}, "the report has method 'exact', this call 'projection'"),
    ):
        with pytest.raises(pt2qa.SelectionError, match=says):
            measured(batches, **{"method": "exact", **options}, resume=report)
    with pytest.raises(pt2qa.SelectionError, match=r"squared output error is .*, in the report"):
        measured(
            [batches[0], batches[1]],
            method="exact",
            post_process=lambda out: 2 * out,
            resume=measured(batches[:1], method="exact"),
        )


def test_a_resumed_batch_is_held_against_its_report_within_a_thousandth() -> None:
    batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    called: list[int] = []

    def nearly(factor: float) -> Any:
        def post_process(out: torch.Tensor) -> torch.Tensor:
            called.append(1)
            return out * factor

        return post_process

    two = measured(batches[:2], method="exact")
    report = measured(batches[:2], method="exact", resume=two, post_process=nearly(1.0004))
    assert (report.rows, report.batches) == (two.rows, 2)
    # Both models on the first batch, and nothing on the second, which is finished.
    assert len(called) == 2
    for factor in (1.0006, 0.9994):
        with pytest.raises(pt2qa.SelectionError, match="squared output error is"):
            measured(batches[:2], method="exact", resume=two, post_process=nearly(factor))


def test_equal_batches_have_the_same_vectors_and_as_many_as_were_asked_for() -> None:
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    report = measured([batch, batch], method="projection", projections=2)
    first, second = (
        {part.place: part.noise for part in report.parts if part.batch == n and part.place >= 0} for n in (0, 1)
    )
    assert first.keys() == second.keys()
    assert first == second
    assert [entry.fingerprint for entry in report.data] == [report.data[0].fingerprint] * 2
    part = measured([batch], method="projection", projections=2)
    assert measured([batch, batch], method="projection", projections=2, resume=part).rows == report.rows
    with pytest.raises(pt2qa.SelectionError, match="the report has projections 2, this call 3"):
        measured([batch, batch], method="projection", projections=3, resume=part)


def test_errors_that_are_not_finite_count_as_zero_and_are_noted() -> None:
    class Saturated(torch.nn.Module):
        """A weight that half precision does not hold, behind which both models are finite."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.erf(self.fc(x))

    torch.manual_seed(0)
    model, plain = Saturated(), Saturated()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.fc.weight[1] = 1e5
        plain.fc.weight[1] = 0.0
    batch = torch.rand(3, 4) + 0.1
    found, without = (
        pt2qa.sensitivity(
            quantized_pair(each, (batch,), "x86:mode=weight_only"),
            [batch],
            method="projection",
            projections=4,
            progress=False,
        )
        for each in (model, plain)
    )
    assert "non-finite errors count as zero at fc/linear" in found.notes
    assert not any("non-finite" in note for note in without.notes)
    assert [row.noise for row in found.rows] == pytest.approx([row.noise for row in without.rows], rel=1e-6)
