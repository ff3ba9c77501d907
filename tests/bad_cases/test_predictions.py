"""What both models predict for the worst samples, on reports, pages and after a merge."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._bad_cases.case_metrics import OutputPair, output_pairs
from pt2qa._bad_cases.predictions import NOTHING, check_names, distinct, predictions
from pt2qa._report.html import html_page
from pt2qa._simulator.data import LEADING

V0_2_0 = Path(__file__).parents[1] / "report" / "v0_2_0" / "bad-cases.safetensors"
NAMES = ["crane", "gull", "crane", "owl"]


def of(reference: Any, quantized: Any, targets: Any = None, names: list[str] | None = None) -> list[Any]:
    (output,) = output_pairs(reference, quantized, 0, len(reference), [None], None)
    return predictions(output, None if targets is None else torch.tensor(targets), distinct(names or ()))


def test_scores_give_the_class_with_the_largest_and_names_that_are_there_twice_get_their_number() -> None:
    reference, quantized = torch.tensor([[1.0, 2, 0, 0], [5, 0, 0, 1]]), torch.tensor([[1.5, 1, 0, 0], [0, 0, 4.5, 1]])
    assert of(reference, quantized) == [("", "1", "0", 2.0, 1.5), ("", "0", "2", 5.0, 4.5)]
    named = of(reference, quantized, [3, -100], NAMES)
    assert named == [
        ("owl", "gull", "crane (0)", 2.0, 1.5),
        ("", "crane (0)", "crane (2)", 5.0, 4.5),
    ]


def test_a_class_a_number_or_nothing() -> None:
    classes = of(torch.tensor([1, 3]), torch.tensor([1, 0]), [1, 1], NAMES)
    assert [each[:3] for each in classes] == [
        ("gull", "gull", "gull"),
        ("gull", "owl", "crane (0)"),
    ]
    (number,) = of(torch.tensor([[2.5]]), torch.tensor([[2.0]]), [1])
    assert number == ("", "", "", 2.5, 2.0)
    broken = of(torch.tensor([[1.0, 2.0]]), torch.tensor([[math.nan, 2.0]]))[0]
    assert (broken[1], broken[2], math.isnan(broken[4])) == ("1", "", True)
    nothing = [torch.rand(2, 3, 4), torch.rand(2, 3).to(torch.complex64), torch.ones(2, 3, dtype=torch.int64)]
    for value in nothing:
        assert [each[1] or each[2] for each in of(value, value)] == ["", ""]
    assert predictions(OutputPair("output", 3, 4, None, "int is not a tensor"), None, ()) == [NOTHING]


def test_with_a_mask_it_is_the_token_that_goes_wrong_first() -> None:
    reference, quantized = torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)
    reference[:, :, 4] = quantized[:, :, 4] = 2.0
    quantized[1, 1, 2] = 3.0
    keep = torch.tensor([[True, True, False], [True, True, True]])
    (output,) = output_pairs(reference, quantized, 0, 2, [LEADING], keep)
    none, wrong = predictions(output, torch.tensor([[4, 4, 4], [4, 3, 4]]), ())
    assert none == NOTHING or none[1] == none[2]
    assert wrong == ("3", "4", "2", 2.0, 3.0)


@pytest.fixture(scope="module")
def found() -> pt2qa.BadCases:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval()
    pictures = torch.rand(12, 1, 8, 8)
    capture = pt2qa.capture(model, pictures[:4])
    pair = pt2qa.quantize(capture, "xnnpack", [pictures[:4]], progress=False)
    data = [(pictures[at : at + 4], torch.tensor([0, 1, 2, 3])) for at in range(0, 12, 4)]
    return pt2qa.find_bad_cases(
        pair, data, k=3, inputs_of=lambda item: item[0], targets_of=lambda item: item[1], classes=NAMES, progress=False
    )


def test_rows_agree_with_both_models_run_on_the_kept_inputs() -> None:
    torch.manual_seed(1)
    model = nn.Linear(16, 4).eval()
    data = [torch.randn(6, 16) for _ in range(3)]
    pair = pt2qa.quantize(pt2qa.capture(model, data[0]), "xnnpack", data[:1], progress=False)
    report = pt2qa.find_bad_cases(pair, data, k=5, progress=False)
    for row in report.rows:
        inputs: Tensor = report.batch(row)
        for graph, name, score in (
            (pair.reference, row.ref_class, row.ref_value),
            (pair.quantized, row.quant_class, row.quant_value),
        ):
            output = graph(inputs)[0].detach()
            assert (str(int(output.argmax())), pytest.approx(float(output.max()))) == (name, score)


def test_the_table_the_page_and_the_file_have_them(found: pt2qa.BadCases, tmp_path: Path) -> None:
    text = found.text(width=160)
    assert "right" in text
    assert "quantized" in text
    for row in found.rows:
        assert {row.ref_class, row.quant_class, row.target} <= {"crane (0)", "gull", "crane (2)", "owl"}
        assert row.ref_class in text
    assert "float\n" not in pt2qa.load(V0_2_0).text(), "a report of before has no such columns"
    (chart, *_) = found.charts(())
    first, row = chart["samples"][0]["lines"], found.rows[0]
    assert re.fullmatch(rf"float [-\d.]+: {re.escape(row.ref_class)}", first[0])
    assert re.fullmatch(rf"quantized [-\d.]+: {re.escape(row.quant_class)}", first[1])
    assert first[2] == f"right: {row.target}"
    assert "Below, what each model predicts" in chart["about"]
    assert html_page([found])
    found.save(tmp_path / "cases.safetensors")
    assert pt2qa.load(tmp_path / "cases.safetensors").csv(extended=True) == found.csv(extended=True)


def test_reports_of_before_load_and_merge_with_those_of_now(tmp_path: Path) -> None:
    older = pt2qa.load(V0_2_0)
    assert isinstance(older, pt2qa.BadCases)
    assert older.rows
    assert {(row.ref_class, row.quant_class, row.target) for row in older.rows} == {("", "", "")}
    both = pt2qa.merge([older, older])
    assert both.samples == 2 * older.samples
    assert [row.value for row in both.worst()][:1] == [row.value for row in older.worst()][:1]


def test_names_must_be_those_of_an_output(found: pt2qa.BadCases) -> None:
    x = torch.rand(2, 4)
    pair = pt2qa.quantize(pt2qa.capture(nn.Linear(4, 3).eval(), x), "xnnpack", [x], progress=False)
    with pytest.raises(pt2qa.SelectionError) as caught:
        pt2qa.find_bad_cases(pair, [x], classes=NAMES, progress=False)
    assert str(caught.value) == "classes has 4 names, and no output has as many scores: output (2, 3)."


@pytest.mark.parametrize(
    ("outputs", "fits"),
    [
        pytest.param([(torch.ones(2, 4), torch.ones(2, 3))], True, id="scores of the reference"),
        pytest.param([(torch.ones(2, 3), torch.ones(2, 4))], False, id="scores of the quantized model"),
        pytest.param([(torch.ones(2, 5, 4), torch.ones(2, 5, 4))], True, id="scores by position"),
        pytest.param([(torch.ones(2, 4, 5), torch.ones(2, 4, 5))], False, id="as many positions"),
        pytest.param([(torch.ones(2, 3).long(), torch.ones(2, 3).long())], True, id="classes"),
        pytest.param(
            [(torch.ones(2, 3), torch.ones(2, 3)), (torch.ones(2, 4), torch.ones(2, 4))], True, id="one of two"
        ),
        pytest.param([(torch.ones(3, 4), torch.ones(3, 4))], False, id="of the batch as a whole"),
        pytest.param([(None, None)], False, id="no tensor"),
    ],
)
def test_names_fit_an_output_that_has_so_many_scores_or_holds_classes(outputs: list[Any], fits: bool) -> None:
    reference, quantized = zip(*outputs, strict=True)
    pairs = list(output_pairs(reference, quantized, 0, 2, [None] * len(outputs), None))
    check_names((), pairs)
    with contextlib.nullcontext() if fits else pytest.raises(pt2qa.SelectionError, match="classes has 4 names"):
        check_names(NAMES, pairs)
