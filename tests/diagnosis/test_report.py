"""What the reports of a diagnosis and of an error budget say, of rows that a test makes up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import pt2qa
from pt2qa._diagnosis.budget import RowSums
from pt2qa._diagnosis.budget_report import BudgetRow, share_of
from pt2qa._diagnosis.report import AsideRow, CauseRow, FigureRow, TriedRow, between, signed
from pt2qa._report.base import Environment
from pt2qa._report.sums import pack
from pt2qa.overrides.plan import Edit, OverridePlan
from pt2qa.report import Diagnosis, ErrorBudget

HERE = Environment.here("")


def cause(rank: int = 1, **given: Any) -> CauseRow:
    own = {"cause": "bias", "name": "fc/linear", "module": "fc", "evidence": "numbers", "remedy": "do it", "gain": 3.0}
    own |= {"gain_in_sequence": 2.0, "cost": 0.0, "sentence": "it is biased", "others": (), "source": ""}
    return CauseRow(rank=rank, **{**own, "quality": 30.0, "how": "simulated", **given})  # type: ignore[arg-type]


def figure(name: str, value: float = 20.0) -> FigureRow:
    return FigureRow(name, value, "output", value, 1, value - 5)


def diagnosis(*rows: CauseRow, **given: Any) -> Diagnosis:
    own = {"tried": (), "figures": (figure("now"),), "asides": (), "verdict": "The verdict.", "next_command": ""}
    own |= {"unit": "dB", "target": "", "met": -1, "budget": "", "plan_json": "", "code": "", "code_verified": ""}
    own |= {"forwards": 2, "quantizations": 1, "batches": 1, "samples": 8, "notes": (), "quantizer": "xnnpack"}
    return Diagnosis(rows=rows, model="Net", environment=HERE, **{**own, **given})


def test_gains_have_signs() -> None:
    assert [signed(value) for value in (3.4, -0.12345, 0.0, math.inf, -math.inf, math.nan)] == [
        *("+3.4", "-0.123", "+0", "inf", "-inf", "nan"),
    ]
    assert between(1.2, 3.4) == "+1.2 to +3.4"


def test_a_row_is_explained_in_four_lines() -> None:
    def said(**given: Any) -> list[str]:
        found = diagnosis(cause(**given), unit=given.get("unit", "dB")).text(width=200).splitlines()
        start = next(at for at, line in enumerate(found) if line.startswith(f"{given.get('rank', 1)}. "))
        return found[start : start + 4]

    assert said() == [
        "1. bias at fc/linear: it is biased.",
        "   Evidence: numbers.",
        "   Remedy: do it",
        "   Measured (simulated): +3 dB, for free.",
    ]
    assert said(source="net.py:1")[0] == "1. bias at fc/linear (net.py:1): it is biased."
    assert said(name="", source="net.py:1")[0] == "1. bias: it is biased."
    assert said(others=("a", "b", "c", "d"))[0].endswith("it is biased. Also at a, b, c and 1 more.")
    assert said(gain=math.nan, gain_in_sequence=math.nan)[3] == "   Measured (simulated): not measured."
    assert said(cost=0.25)[3].endswith("+3 dB, for 25.00 % of the multiply-accumulates.")
    assert said(low=1.0, high=5.0)[3].endswith("+3 dB (+1 to +5 dB on samples like these), for free.")
    assert said(low=1.0, high=5.0, output="y")[3].endswith("+3 dB at y (+1 to +5 dB on samples like these), for free.")
    assert said(output="y")[3].endswith("+3 dB, for free.")
    assert said(rank=2)[3].endswith("+3 dB alone, +2 dB after the remedies above, for free.")
    assert said(rank=2, gain_in_sequence=math.nan)[3].endswith("+3 dB, for free.")


@pytest.mark.parametrize(("how", "unit"), [("deployed", "dB"), ("compared", "dB"), ("simulated", "top1")])
def test_what_kernels_or_stages_gain_is_in_decibels(how: str, unit: str) -> None:
    (step,) = diagnosis(cause(how=how), unit="top1").advice()
    assert step.gain == f"+3 {unit}, for free"
    assert (step.what, step.name, step.remedy) == ("bias", "fc/linear", "do it")


def test_remedies_that_were_not_measured_are_grouped_by_reason() -> None:
    tried = (
        *(TriedRow("bias", "a", "one", 1.5, "too little"), TriedRow("range", "", "two", math.nan, "no data")),
        *(TriedRow("observer", "b", "three", math.nan, "no data"), TriedRow("bias", "c", "four", -1.0, "no gain")),
    )
    text = diagnosis(tried=tried).text(width=200)
    start = text.index("Tried, and not recommended (4):")
    assert text[start:].splitlines()[1:4] == [
        "  bias at a: one: +1.5 dB; too little",
        "  bias at c: four: -1 dB; no gain",
        "  no data: range: two; observer at b: three",
    ]


def test_a_diagnosis_is_graded_by_what_there_is_to_do() -> None:
    assert diagnosis().grade() == "good"
    assert diagnosis(cause()).grade() == diagnosis(met=0).grade() == "bad"
    assert diagnosis(figures=(figure("now", math.nan),)).grade() == diagnosis(figures=()).grade() == "bad"
    aside = AsideRow("rule", "a", "why", "fix")
    assert diagnosis(asides=(aside,)).grade() == diagnosis(next_command="x").grade() == "warning"
    assert diagnosis(met=1).grade() == "good"


def test_the_quality_after_is_that_of_the_pair_or_with_advice() -> None:
    now, after, advice = figure("now", 10.0), figure("after", 20.0), figure("with the advice", 30.0)
    assert [diagnosis(figures=found).sqnr_after for found in ((now,), (now, advice), (now, advice, after))] == [
        *(10.0, 30.0, 20.0),
    ]
    assert diagnosis(figures=(after, now)).sqnr == 10.0


def test_the_page_says_all_of_it() -> None:
    plain = diagnosis(cause())
    text = plain.text(width=200)
    assert text.startswith("Diagnosis of Net, quantized by xnnpack; 1 batch")
    assert "\nThe verdict.\n" in text
    assert "Cost: 2 model runs on a batch, 1 quantization." in text
    assert "Measured" in text
    assert "Next:" not in text
    assert "executed in a plain export flow" not in text
    assert repr(plain) == "<Diagnosis of Net, xnnpack: The verdict.>"
    asides = (AsideRow("rule", "a", "why", "fix"), AsideRow("other", "", "why", "fix"))
    full = diagnosis(
        *(cause(), cause(2)),
        asides=asides,
        code="x",
        code_verified="equal",
        next_command="call",
        budget="A budget.",
        story="int8 1 dB -> with 2 dB",
        forwards=1,
        quantizations=2,
    )
    text = full.text(width=200)
    for part in (
        *(
            "\nThe verdict.\n",
            "\nint8 1 dB -> with 2 dB.\n",
            "Errors found by pt2qa.check (2):\n  rule, a: why -> fix\n",
        ),
        *("  other: why -> fix", "A budget.", "Code with all remedies, executed in a plain export flow: equal."),
        *("Cost: 1 model run on a batch, 2 quantizations.", "Next: call"),
    ):
        assert part in text
    assert list(full.lines()) == ["The verdict.", "int8 1 dB -> with 2 dB.", *full._data()]
    assert [step.what for step in full.advice()] == ["bias", "bias"]
    two = diagnosis(cause(1, gain=1.0, name="a"), cause(2, gain=9.0, name="b"))
    in_order, by_gain = two.text(), two.text(sort="gain")
    assert in_order.index("a ") < in_order.index("b ")
    assert by_gain != in_order
    assert "rank" not in diagnosis().text()


def test_evidence_is_attached_and_not_stored() -> None:
    plain = diagnosis()
    assert (plain.reports, plain.search_target, plain.treatments) == ({}, None, ())
    with pytest.raises(pt2qa.ReportError, match="this diagnosis has no pair"):
        plain.pair  # noqa: B018
    with pytest.raises(pt2qa.ReportError, match="no remedy of this diagnosis is an edit"):
        plain.plan  # noqa: B018
    full = diagnosis().with_evidence("pair", {"budget": plain}, 20.0, ["treatment"])
    assert (full.pair, full.reports, full.search_target, full.treatments) == (
        *("pair", {"budget": plain}, 20.0, ("treatment",)),
    )
    plan = OverridePlan((Edit("float", ("a",)),), "xnnpack", "Net")
    assert diagnosis(plan_json=plan.to_json()).plan == plan


def row(site: int, mechanism: str, noise: float, **given: Any) -> BudgetRow:
    kind = mechanism.split()[0]
    own = {"name": f"m{site}/linear", "module": f"m{site}", "op": "linear", "kind": kind, "dtype": "int8"}
    return BudgetRow(
        **{**own, **given},
        mechanism=mechanism,
        noise=noise,
        noise_share=noise / 10,
        site=site,
        error=0.1,  # type: ignore[arg-type]
    )


def budget(*rows: BudgetRow, noise: float = 10.0, **given: Any) -> ErrorBudget:
    own = {"outputs": ("output",), "method": "projection", "projections": 4, "signal": 1000.0, "batches": 2}
    own |= {"samples": 16, "notes": (), "quantizer": "xnnpack", "model": "Net", "environment": HERE}
    return ErrorBudget(rows=rows, noise=noise, **{**own, **given})


ROUNDING, CLAMPING, WEIGHT = "activation rounding", "activation clamping", "weight rounding"


def test_noise_is_added_up_by_any_column_most_first() -> None:
    made = budget(row(0, ROUNDING, 1.0), row(0, CLAMPING, 3.0), row(1, WEIGHT, 2.0), row(2, ROUNDING, math.nan))
    assert made.by("mechanism") == {CLAMPING: 3.0, WEIGHT: 2.0, ROUNDING: 1.0}
    assert list(made.by("mechanism")) == [CLAMPING, WEIGHT, ROUNDING]
    assert list(made.by("module").items()) == [("m0", 4.0), ("m1", 2.0)]
    assert (made.parts, made.interactions, made.sqnr) == (6.0, 4.0, 20.0)
    assert budget(noise=0.0).sqnr == math.inf


@pytest.mark.parametrize(
    ("mechanism", "noise", "fault"),
    [
        (CLAMPING, 1.1, "range"),
        ("weight clamping", 1.1, "range"),
        (WEIGHT, 1.1, "precision"),
        ("bias", 1.1, "precision"),
        ("nested graph not attributed", 1.1, ""),
        (CLAMPING, 1.0, ""),  # half is not most
    ],
)
def test_a_fault_is_what_makes_most_of_the_noise(mechanism: str, noise: float, fault: str) -> None:
    made = budget(row(0, mechanism, noise), row(1, ROUNDING, 1.0))
    assert made.fault == fault
    lead = " ".join(made._lead())
    if fault:
        share = f"{mechanism} causes 52 % of the attributed noise; "
        assert f"{fault.capitalize()} fault: {share}" in lead
        assert ("more bits do not." in lead) == (fault == "range")
        assert ("wider ranges do not." in lead) == (fault == "precision")
    elif mechanism.startswith("nested"):
        assert "Most of the attributed noise is from nested graphs whose sites are unknown: analyse them" in lead
    else:
        assert "No mechanism causes more than half of the attributed noise." in lead


def test_without_noise_there_is_nothing_to_say() -> None:
    equal = budget(row(0, ROUNDING, 0.0), noise=0.0)
    assert list(equal._lead()) == ["The outputs of both models are equal: there is no noise to attribute."]
    assert equal.in_short() == ""
    assert equal.charts([]) == []
    assert equal.fault == ""
    silent = budget(row(0, ROUNDING, 0.0))
    assert silent._about_fault() == []
    assert share_of(1.0, 10.0) == 0.1
    assert share_of(0.0, 0.0) == 0.0
    assert math.isnan(share_of(1.0, 0.0))


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (10.0, "interactions 0 % of the whole"),
        (20.0, "interactions 50 % of the whole"),
        (20.1, "errors of several sites add up, to 2.0 times that"),
        (6.6, "errors of several sites mostly cancel, to 66 % of that"),
        (6.7, "interactions -49 % of the whole"),
    ],
)
def test_what_is_left_is_interactions(noise: float, said: str) -> None:
    made = budget(row(0, ROUNDING, 9.97), row(1, WEIGHT, 0.03), row(2, CLAMPING, 0.0), noise=noise)
    assert made._by_mechanism() == f"activation rounding 100 %, weight rounding <1 %, {said}"
    assert made.in_short() == f"Error budget: {made._by_mechanism()}; most in m0 100 %, m1 <1 %, m2 0 %."
    half = budget(row(0, ROUNDING, 0.05), row(0, WEIGHT, 9.95))._by_mechanism()
    assert half.startswith("weight rounding 99 %, activation rounding <1 %")  # 0.5 % is no 0 %


def test_the_noisiest_modules_are_named_up_to_three() -> None:
    rows = [row(site, ROUNDING, 4.0 - site) for site in range(4)]
    assert budget(replace(rows[0], module=""), *rows[1:]).in_short().endswith("most in the top 40 %, m1 30 %, m2 20 %.")


def test_rows_without_effect_and_without_a_number_are_counted() -> None:
    quiet = budget(row(0, ROUNDING, 0.0), row(1, ROUNDING, 1.0), row(2, ROUNDING, 0.0))
    assert list(quiet._summary()) == ["Counts: 2 of 3 rows without effect on the output."]
    missing = budget(*quiet.rows, row(3, ROUNDING, math.nan), row(3, CLAMPING, math.nan))
    assert list(missing._summary()) == [
        "Not attributed, because each alone makes the output NaN or infinite: m3/linear.",
        "Counts: 2 of 5 rows without effect on the output.",
    ]
    assert missing.text(width=200).startswith(
        "Output SQNR 20.0 dB; error budget of Net · xnnpack: projection method, 2 batches"
    )
    assert repr(missing).startswith("<ErrorBudget of Net · xnnpack: output SQNR 20 dB>")


def test_charts_add_up_to_the_whole() -> None:
    rows = [row(site, ROUNDING, 1.0 + site / 100) for site in range(17)]
    rows += [row(0, CLAMPING, 2.0), replace(row(17, WEIGHT, 5.0), module=""), row(1, ROUNDING, math.nan)]
    noise = sum(each.noise for each in rows[:-1]) + 3.0
    modules, mechanisms = budget(*rows, noise=noise).charts([])
    series = [ROUNDING, CLAMPING, WEIGHT, "interactions"]
    assert modules["series"] == mechanisms["series"] == series
    shown = {bar["label"]: bar["parts"] for bar in modules["bars"]}
    assert len(shown) == 17  # fifteen modules, the others, interactions
    assert list(shown)[:2] == ["(top level)", "m0"]
    assert list(shown)[-2:] == ["3 other modules", "interactions"]
    assert shown["m0"] == pytest.approx([1.0 / noise, 2.0 / noise, 0.0, 0.0])
    assert shown["interactions"] == pytest.approx([0.0, 0.0, 0.0, 3.0 / noise])
    assert shown["3 other modules"] == pytest.approx([(1.01 + 1.02 + 1.03) / noise, 0.0, 0.0, 0.0])
    assert sum(map(sum, shown.values())) == pytest.approx(1.0)
    assert modules["bars"][1]["text"] == f"{300 / noise:.2f} %"
    by_mechanism = {bar["label"]: bar["parts"] for bar in mechanisms["bars"]}
    assert list(by_mechanism) == [ROUNDING, WEIGHT, CLAMPING, "interactions"]
    assert sum(map(sum, by_mechanism.values())) == pytest.approx(1.0)


def summed_up(made: ErrorBudget, settings: dict[str, str], variance: float) -> ErrorBudget:
    sums = [RowSums(each.site, each.mechanism, each.noise, variance) for each in made.rows]
    return replace(made, sums=pack(settings, rows=sums))


def test_merged_budgets_add_up_noise_and_variance() -> None:
    rows = (row(0, ROUNDING, 1.0), row(1, WEIGHT, 2.0))
    first = summed_up(budget(*rows), {"quantization": "q"}, 0.09)
    other = replace(first, noise=30.0, signal=500.0, batches=3, samples=24, projections=8, notes=("b",))
    found = pt2qa.merge([first, other])
    assert [each.noise for each in found.rows] == [2.0, 4.0]
    assert [each.noise_share for each in found.rows] == pytest.approx([0.05, 0.1])
    assert [each.error for each in found.rows] == pytest.approx([0.18**0.5 / 40] * 2)
    assert (found.noise, found.signal, found.batches, found.samples) == (40.0, 1500.0, 5, 40)
    assert found.projections == 8
    assert found.notes == ("report 2 of 2: b",)
