"""The worst samples as pictures, waveforms and tokens."""

from __future__ import annotations

import io
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from pt2qa._bad_cases.report import SIDE
from pt2qa.report import BadCases, CaseRow, Ranking, StoredCase
from tests.report.conftest import HERE


def report(samples: list[np.ndarray[Any, Any]], sample: int = 0) -> BadCases:
    """One case for each array, whose first axis is that of the batch."""
    count = len(samples)
    return BadCases(
        rows=tuple(CaseRow("sqnr", "output", n + 1, 1.5 + n, n, sample, 10 * n) for n in range(count)),
        rankings=(Ranking("sqnr", "output", "smallest", count, 3.0, 0, 0),),
        labels=(),
        cases=tuple(
            StoredCase(n, sample, 10 * n, 1, f'{{"tensor": 0, "dtype": "{each.dtype}"}}')
            for n, each in enumerate(samples)
        ),
        inputs={f"{n}/{sample}/0": each[None] for n, each in enumerate(samples)},
        batch_axis=0 if sample >= 0 else -1,
        steps=count,
        samples=count,
        set_apart=(),
        notes=(),
        quantizer="xnnpack",
        model="Net",
        environment=HERE,
    )


def drawn(*samples: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    (chart,) = report(list(samples)).charts(())
    assert chart["kind"] == "samples"
    found: list[dict[str, Any]] = chart["samples"]
    return found


def pixels(found: dict[str, Any]) -> np.ndarray[Any, Any]:
    decoded = (255 * imread(io.BytesIO(b64decode(found["png"])))).round()
    assert decoded.shape[:2] == (found["height"], found["width"])
    return np.asarray(decoded)


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_a_picture_goes_from_black_to_white_in_either_layout(colours: int, last: bool) -> None:
    values = np.random.default_rng(0).normal(size=(colours, 5, 7)).astype(np.float32)
    expected = (255 * (values - values.min()) / (values.max() - values.min())).round().transpose(1, 2, 0)
    (found,) = drawn(values.transpose(1, 2, 0) if last else values)
    assert found["label"] == "0: 1.5 dB"
    decoded = pixels(found)
    assert np.array_equal(decoded.reshape(5, 7, colours), expected)


def test_large_pictures_are_thinned_and_what_is_not_finite_is_zero() -> None:
    values = np.arange(300 * 200, dtype=np.float32).reshape(300, 200)
    values[0, 0], values[0, 3] = np.nan, np.inf
    (found,) = drawn(values)
    assert (found["height"], found["width"]) == (100, 67)
    assert max(found["height"], found["width"]) <= SIDE
    assert np.array_equal(pixels(found).reshape(100, 67, -1)[0, :2, 0], [0, 0])


def test_waveforms_and_tokens() -> None:
    wave = np.sin(np.linspace(0, 6, 1000)).astype(np.float32)
    line, tokens, few = drawn(wave, np.arange(20), np.arange(3))
    shown = wave[::9]
    assert line["line"] == pytest.approx(((shown - shown.min()) / (shown.max() - shown.min())).tolist(), abs=5e-4)
    assert tokens["text"] == "0 1 2 3 4 5 6 7 8 9 10 11 …"
    assert few["text"] == "0 1 2"


def test_what_has_no_such_shape_and_whole_batches_are_not_drawn() -> None:
    strange = [np.zeros((2, 2), np.float32), np.zeros((5, 8, 8), np.float32), np.zeros(4, np.float32), np.zeros(0)]
    assert report(strange).charts(()) == []
    assert report([np.zeros((8, 8), np.float32)], sample=-1).charts(()) == []
    assert replace(report([]), rankings=()).charts(()) == []


def test_matplotlib_draws_all_kinds() -> None:
    wave, picture = np.sin(np.linspace(0, 6, 50)).astype(np.float32), np.eye(6, dtype=np.float32)
    axes = report([picture, wave, np.arange(4)]).plot("Worst samples")
    assert [each.get_text() for each in axes.get_xticklabels()] == ["0: 1.5 dB", "10: 2.5 dB", "20: 3.5 dB"]
    assert len(axes.images) == len(axes.lines) == len(axes.texts) == 1


def test_the_largest_floats_are_drawn_without_a_warning() -> None:
    values = np.full((6, 6), -1.7e308)
    values[0, 0] = 1.7e308
    (found,) = drawn(values)
    assert pixels(found).reshape(6, 6, -1)[0, :2, 0].tolist() == [255, 0]
