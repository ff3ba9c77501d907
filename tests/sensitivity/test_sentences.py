"""Every sentence, number and chart of a sensitivity report, from rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan, log10, nan
from typing import Any

import pytest

from pt2qa.report import Environment, SensitivityBatch, SensitivityReport, SensitivityRow

HELP = (
    "What helps is not measured here: pt2qa.repair chooses the ranges and biases that cost the output least, "
    "pt2qa.reconfigure keeps ops in float, and pt2qa.diagnose measures the gain of each remedy."
)


def row(number: int, noise: float, total: float, **changes: Any) -> SensitivityRow:
    plain = SensitivityRow(
        name=f"layer{number}/conv2d",
        kind="weight" if number % 2 else "activation",
        op="conv2d",
        value=10 * log10(100 / noise) if noise else inf,
        dtype="int8",
        flops=100 * number,
        flops_share=number / 10,
        site=number,
        handle=number,
        module=f"layer{number}",
        region=number,
        noise=noise,
        noise_share=noise / total if total else 0.0,
        error=0.25,
        rank=number + 1,
        near_tie=False,
    )
    return replace(plain, **changes)


def report(noises: list[float], measured: float | None = None, **changes: Any) -> SensitivityReport:
    """Rows of these noises, the largest first, of a signal of 100."""
    total = sum(noises)
    plain = SensitivityReport(
        rows=tuple(row(number, noise, total) for number, noise in enumerate(noises)),
        outputs=("output",),
        method="projection",
        metric="sqnr",
        worst_is="smallest",
        group="site",
        projections=4,
        planned=len(noises),
        signal=100.0,
        noise=total if measured is None else measured,
        value=10.0,
        batches=2,
        samples=16,
        notes=("one",),
        quantizer="xnnpack",
        model="Net",
        environment=Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a"),
        data=(SensitivityBatch("ab", 8, 50.0), SensitivityBatch("cd", 8, 50.0)),
        parts=(),
    )
    return replace(plain, **changes)


def said(found: SensitivityReport) -> list[str]:
    return [*found._lead(), *found._summary()]


def test_what_a_report_of_several_rows_says() -> None:
    assert said(report([5.0, 2.5, 2.5, 0.0])) == [
        "The quantized model has an output SQNR of 10.0 dB; the noise of the rows adds up to 10.0 dB: "
        "errors add up, within 1 dB.",
        "Worst: layer0/conv2d (activation), 13.0 dB when it alone is quantized.",
        "1 site of 4 causes 50.00 % of the noise.",
        HELP,
        "Counts: 1 without effect on the output, 0 rows without a number, 1 note.",
    ]
    # The fewest rows that make half of it, and the flops of the weights among them alone.
    several = said(report([4.0, 3.0, 3.0]))
    assert several[2] == "2 sites of 3 cause 70.00 % of the noise, with 10.00 % of the flops."
    by_module = said(report([4.0, 3.0, 3.0], group="module"))
    assert by_module[2] == "2 modules of 3 cause 70.00 % of the noise, with 10.00 % of the flops."
    grouped = report([3.0, 4.0, 3.0], group="region")
    assert "2 regions of 3 cause 70.00 % of the noise, with 10.00 % of the flops." in said(grouped)
    # Without flops there is nothing to say of them, and an activation of a single site has none of its own.
    assert "1 region of 1 causes 100.00 % of the noise." in said(report([3.0], group="region"))


def test_without_a_number_rows_are_named_and_not_ranked() -> None:
    whole = report([5.0, 5.0, 5.0, 5.0, 5.0])
    rows = [replace(each, value=nan, noise=nan, noise_share=nan) if each.site else each for each in whole.rows]
    found = said(replace(whole, rows=tuple(rows)))
    assert found[0] == "The quantized model has an output SQNR of 6.0 dB."
    assert found[1] == (
        "Not ranked, because the output has no number when they alone are quantized: layer1/conv2d, layer2/conv2d, "
        "layer3/conv2d and 1 more."
    )
    assert found[-1] == "Counts: 0 without effect on the output, 4 rows without a number, 1 note."
    assert found[3] == "1 site of 5 causes 20.00 % of the noise."
    assert isnan(replace(whole, rows=tuple(rows)).predicted_sqnr)


def test_rows_that_are_missing_or_have_no_effect() -> None:
    none = report([])
    assert said(none) == [
        "The quantized model's outputs are equal to the reference's, and no row changes them.",
        "No row was measured.",
        "Counts: 0 without effect on the output, 0 rows without a number, 1 note.",
    ]
    assert said(report([0.0, 0.0])) == [
        "The quantized model's outputs are equal to the reference's, and no row changes them.",
        "Counts: 2 without effect on the output, 0 rows without a number, 1 note.",
    ]
    lacking = said(report([5.0, 5.0], planned=7))
    assert lacking[0] == "The quantized model has an output SQNR of 10.0 dB; 5 of 7 rows are missing."
    assert report([0.0], measured=0.0, signal=0.0).measured_sqnr == inf
    assert isnan(report([1.0], signal=0.0).measured_sqnr)


@pytest.mark.parametrize(
    ("gain", "how"),
    [
        (0.0, "errors add up, within 1 dB"),
        (0.99, "errors add up, within 1 dB"),
        (-0.99, "errors add up, within 1 dB"),
        (1.01, "errors add up roughly, within 3 dB"),
        (-2.99, "errors add up roughly, within 3 dB"),
        (3.01, "errors do not add up, they cancel or saturate together; take the rows as a ranking"),
        (-3.01, "errors do not add up, they are worse together; take the rows as a ranking"),
    ],
)
def test_how_errors_add_up_is_told_by_what_was_measured(gain: float, how: str) -> None:
    lead = said(report([5.0, 5.0], measured=10.0 / 10 ** (gain / 10)))[0]
    whole_model = f"The quantized model has an output SQNR of {10 + gain:.1f} dB"
    assert lead == f"{whole_model}; the noise of the rows adds up to 10.0 dB: {how}."


def test_what_cannot_be_compared_is_not() -> None:
    assert said(report([5.0, 5.0], measured=nan))[0] == (
        "The quantized model has an output SQNR of nan dB; the noise of the rows adds up to 10.0 dB."
    )
    equal = said(report([0.0], measured=1e-9))[0]
    assert "adds up to inf dB: errors do not add up, they are worse together" in equal


def test_near_ties_are_told_where_something_was_sampled() -> None:
    marked = report([5.0, 5.0, 1.0])
    marked = replace(marked, rows=tuple(replace(each, near_tie=each.site < 2) for each in marked.rows))
    sentence = "2 rows marked ≈: within the sampling error of an adjacent rank; more projections separate them."
    assert sentence in said(marked)
    assert sentence not in said(replace(marked, projections=0))
    assert not any("≈" in each for each in said(report([5.0, 5.0, 1.0])))
    table = marked.table(width=200).splitlines()
    assert [line.count("≈") for line in table if "conv2d" in line and "layer" in line] == [1, 1, 0]


def test_titles_and_columns_have_the_unit_of_the_metric() -> None:
    found = report([5.0, 2.0])
    of = "Net, quantized by xnnpack: 2 sites, each quantized alone"
    assert (
        found._title("worst") == f"{of}; projection method, 4 projections, 2 batches (16 samples), smallest sqnr first"
    )
    exact = replace(found, projections=0, method="exact", metric="a_loss_of_mine_with_a_long_name", worst_is="largest")
    assert exact._title("worst").startswith(f"{of}; exact method, 2 batches (16 samples), largest a_loss")
    columns = {each.name: each for each in found._columns_for("worst")}
    assert (columns["value"].header, columns["value"].unit, columns["value"].worse) == ("SQNR\ndB", "dB", "smaller")
    assert (columns["value"].show(12.345), columns["error"].show(0.0341)) == ("12.3", "0.03")
    assert columns["error"].header == "± dB"
    others = {each.name: each for each in exact._columns_for("worst")}
    assert (others["value"].header, others["value"].unit, others["value"].worse) == (
        "a_loss_of_mine_with_",
        "",
        "larger",
    )
    assert (others["value"].show(12.345), others["error"].show(0.0341)) == ("12.35", "nan")
    assert others["error"].header == "±"
    assert [columns["error"].show(value) for value in (0.0, inf, nan, 0.26)] == ["0", "inf", "nan", "0.3"]
    assert "Worst: layer0/conv2d (activation), a_loss_of_mine_with_a_long_name 13.01" in said(exact)[1]


def test_a_chart_has_the_rows_that_cost_most() -> None:
    found = report([float(40 - number) for number in range(30)])
    spoilt = replace(found, rows=(replace(found.rows[0], noise_share=nan), *found.rows[1:]))
    (chart,) = spoilt.charts([])
    assert (chart["title"], chart["about"]) == (
        "Share of the output noise, by site",
        "The 25 sites that cost most.",
    )
    total = sum(40 - number for number in range(30))
    drawn = [(each["label"], each["value"], each["text"]) for each in chart["bars"]]
    assert drawn == [
        (
            f"layer{number}/conv2d ({'weight' if number % 2 else 'activation'})",
            (40 - number) / total,
            f"{100 * (40 - number) / total:.2f} %",
        )
        for number in range(1, 26)
    ]
    (by_module,) = replace(found, rows=found.rows[:1], group="module").charts([])
    assert (by_module["title"], by_module["about"]) == ("Share of the noise, by module", "The 1 module that cost most.")
