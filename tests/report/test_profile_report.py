"""A profile comes back from its file, finds its rows, fits the screen, and says what to look at; so do differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pt2qa._profile.histogram import CHANNELS, HISTOGRAM, RELATIVE_ERROR, Histogram, packed
from pt2qa._profile.report import BULK, QUANTILES
from pt2qa.errors import ReportError
from pt2qa.report import Environment, Profile, ProfileDiff, ProfileRow, diff_profiles, load

HERE = Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")


def row(value: int, values: np.ndarray[Any, Any], **changes: Any) -> ProfileRow:
    """A row of real numbers, computed by NumPy."""
    magnitudes = np.abs(values[values != 0])
    quantiles = {
        column: float(np.quantile(values, share, method="inverted_cdf")) for column, share in QUANTILES.items()
    }
    peak = float(magnitudes.max() / np.quantile(magnitudes, BULK, method="inverted_cdf")) if magnitudes.size else nan
    plain = ProfileRow(
        name=f"features.{value}.conv.1.0/conv2d",
        module=f"features.{value}.conv.1.0",
        op="conv2d",
        role="output",
        argument="",
        of=f"features.{value}.conv.1.0/conv2d",
        dtype="float32",
        scheme="",
        axis=-1,
        scale=nan,
        zero_point=nan,
        shape=(8, 4, 10, 10),
        count=values.size,
        min=float(values.min()),
        max=float(values.max()),
        mean=float(values.mean()),
        variance=float(values.var()),
        zeros=float(np.mean(values == 0)),
        nans=0,
        infs=0,
        saturation=nan,
        range_use=nan,
        outlier_ratio=peak,
        source=f"net.py:{value}: x = self.conv(x)",
        value=value,
        handle=value,
        **quantiles,
    )
    return replace(plain, **changes)


def make(arrays: list[np.ndarray[Any, Any]], changes: dict[int, dict[str, Any]], **fields: Any) -> Profile:
    rows = [row(value, array, **changes.get(value, {})) for value, array in enumerate(arrays)]
    # The op after each reads what it makes.
    readers = [
        replace(after, role="input", argument="input", of=made.name, **_numbers(made))
        for made, after in pairwise(rows)
        if made.role == "output"
    ]
    histograms = [Histogram.of(array) for array in arrays]
    plain = Profile(
        rows=tuple(each for made in rows for each in (*(r for r in readers if r.name == made.name), made)),
        histograms=packed(HISTOGRAM, [(each.bins, each.counts) for each in histograms]),
        channels={},
        side="reference",
        quantizer="xnnpack",
        batches=2,
        samples=16,
        notes=(),
        model="MobileNetV2",
        environment=HERE,
    )
    return replace(plain, **fields)


def _numbers(of: ProfileRow) -> dict[str, Any]:
    of_value = (
        "dtype",
        "count",
        "min",
        "max",
        "mean",
        "variance",
        *QUANTILES,
        "zeros",
        "nans",
        "infs",
        "outlier_ratio",
        "value",
    )
    return {name: getattr(of, name) for name in of_value}


def arrays() -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    values = [generator.normal(size=3200) for _ in range(5)]
    values[1][7] = 75.0
    values[2] = np.zeros(3200)
    values[3] = np.maximum(values[3], 0)
    return values


@pytest.fixture
def plain() -> Profile:
    """Five outputs: one with an outlier, one all zero, one with NaN."""
    return make(arrays(), {4: {"nans": 2, "infs": 1, "count": 3203}}, notes=("forward writes to x",))


@pytest.fixture
def quantized() -> Profile:
    """The same, quantized: the outlier is clamped, a range is hardly used, one value moved."""
    values = arrays()
    values[1] = np.clip(values[1], -2, 2)
    values[0] = values[0] + 0.5
    changes = {
        1: {"saturation": 0.046, "range_use": 1.0, "dtype": "int8", "scheme": "per_tensor", "scale": 0.0157},
        3: {"saturation": 0.0, "range_use": 0.21, "dtype": "int8", "scheme": "per_tensor", "scale": 0.07},
    }
    return make(values, changes, side="quantized")


@pytest.fixture
def difference(plain: Profile, quantized: Profile) -> ProfileDiff:
    extra = replace(quantized.rows[-1], name="head/linear", module="head", op="linear")
    return diff_profiles(plain, replace(quantized, rows=(*quantized.rows, extra)))


# -- files -------------------------------------------------------------------------------------------------------------


def test_comes_back_from_its_file(plain: Profile, difference: ProfileDiff, tmp_path: Any) -> None:
    for report in (plain, difference):
        report.save(tmp_path / "report.safetensors")
        back = load(tmp_path / "report.safetensors")
        assert repr(back.rows) == repr(report.rows)  # type: ignore[attr-defined]
        assert str(back) == str(report)
    plain.save(tmp_path / "report.safetensors")
    back = load(tmp_path / "report.safetensors")
    assert isinstance(back, Profile)
    assert all(np.array_equal(back.histograms[name], array) for name, array in plain.histograms.items())


@pytest.mark.parametrize(
    ("field", "array", "says"),
    [
        ("histograms/counts", np.zeros(3, np.int64), r"histograms: the arrays do not fit 5 values"),
        (
            "histograms/offsets",
            np.array([0, 5]),
            r"histograms: the arrays do not fit 5 values: offsets \(2,\) end at \[5\]",
        ),
        ("histograms/offsets", np.zeros(6), r"histograms: the arrays do not fit 5 values"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(
    plain: Profile, tmp_path: Any, field: str, array: np.ndarray[Any, Any], says: str
) -> None:
    path = tmp_path / "p.safetensors"
    plain.save(path)
    with safe_open(path, framework="np") as file:
        metadata = dict(file.metadata())
    save_file({**load_file(path), field: array}, path, metadata)
    with pytest.raises(ReportError, match=rf"p.safetensors: {says}"):
        load(path)


def test_arrays_of_another_name_are_refused(plain: Profile) -> None:
    with pytest.raises(
        ReportError, match=r"channels: got arrays \['x'\], expected \['count', 'max', .*'zeros'\], or none"
    ):
        replace(plain, channels={"x": np.zeros(2)})


# -- rows and histograms -----------------------------------------------------------------------------------------------


def test_each_value_is_shown_where_it_is_made(plain: Profile) -> None:
    assert [each.role for each in plain.values] == ["output"] * 5
    readers = tuple(each for each in plain.rows if each.role == "input")
    assert [each.role for each in replace(plain, rows=readers).values] == ["input"] * 4


def test_rows_are_found_by_name_role_and_argument(plain: Profile) -> None:
    assert plain.find("features.1.conv.1.0/conv2d", "input", "input").of == "features.0.conv.1.0/conv2d"
    with pytest.raises(ReportError, match=r"no op 'features.1.conv/conv2d'; near names: features.1.conv.1.0/conv2d"):
        plain.find("features.1.conv/conv2d")
    with pytest.raises(ReportError, match=r"'features.1.conv.1.0/conv2d' has no weight; it has input, output"):
        plain.find("features.1.conv.1.0/conv2d", "weight")


def test_a_histogram_is_given_in_counted_equal_or_other_bins(plain: Profile) -> None:
    values, made = arrays()[0], plain.values[0]
    edges, counts = plain.histogram(made)
    assert counts.dtype == np.int64
    assert np.array_equal(counts, np.histogram(values, edges)[0])
    edges, counts = plain.histogram(made, 20)
    assert (edges[0], edges[-1], len(counts)) == (values.min(), values.max(), 20)
    assert np.abs(counts - np.histogram(values, edges)[0]).max() < 20
    grid = [-1.0, 0.0, 1.0]
    assert plain.histogram(made, grid)[1] == pytest.approx(np.histogram(values, grid)[0], abs=8)
    zero_edges, zero_counts = plain.histogram(plain.values[2], 4)
    assert (zero_edges.tolist(), zero_counts.tolist()) == ([-0.5, -0.25, 0.0, 0.25, 0.5], [0, 0, 3200, 0])


def test_any_quantile(plain: Profile) -> None:
    expected = np.quantile(arrays()[0], 0.25, method="inverted_cdf")
    assert plain.quantile(plain.values[0], 0.25) == pytest.approx(expected, rel=RELATIVE_ERROR)
    assert plain.quantile(plain.values[0], 1.0) <= plain.values[0].max
    with pytest.raises(ReportError, match=r"share: got 99, expected 0..1; 0.99 is the 99 % quantile"):
        plain.quantile(plain.values[0], 99)


def test_numbers_by_channel(plain: Profile) -> None:
    columns = [[np.array([1, 2]) + value for _ in CHANNELS] if value == 3 else [np.zeros(0)] * 6 for value in range(5)]
    report = replace(plain, channels=packed(CHANNELS, columns))
    made = replace(report.values[3], channels=1)
    assert report.channel(made)["max"].tolist() == [4, 5]


def test_columns(plain: Profile, difference: ProfileDiff) -> None:
    table = plain.to_pandas()
    assert list(table.columns)[:8] == ["name", "module", "op", "role", "argument", "of", "dtype", "scheme"]
    assert list(plain.to_pandas(extended=True).columns)[-3:] == ["value", "handle", "channels"]
    assert str(table["zero_point"].dtype) == "Int64"
    assert len(plain.csv().splitlines()) == 1 + len(plain.rows)
    assert "a_value" not in difference.to_pandas().columns
    assert repr(plain) == "<Profile of MobileNetV2, reference for xnnpack: 9 rows, 5 values, 2 batches>"


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 100])
def test_text(
    plain: Profile, quantized: Profile, difference: ProfileDiff, golden: Callable[[str, str], None], width: int
) -> None:
    golden(f"profile-{width}", plain.text(width=width))
    golden(f"profile-quantized-{width}", quantized.text(width=width))
    golden(f"profile-diff-{width}", difference.text(width=width))


@pytest.mark.parametrize("sort", ["worst", "graph", "name", "max", "zeros", "op", "count", "saturation"])
@pytest.mark.parametrize("width", [40, 77])
def test_fits_the_screen(plain: Profile, sort: str, width: int) -> None:
    assert max(map(len, plain.text(sort=sort, width=width).splitlines())) <= width


@pytest.mark.parametrize("sort", ["worst", "graph", "name", "outside", "a_mean", "distance"])
@pytest.mark.parametrize("width", [40, 77])
def test_a_difference_fits_the_screen(difference: ProfileDiff, sort: str, width: int) -> None:
    assert max(map(len, difference.text(sort=sort, width=width).splitlines())) <= width


def test_what_is_broken_comes_first(plain: Profile) -> None:
    names = [line.split()[0] for line in plain.table(width=160).splitlines()[3:6]]
    assert names[:2] == ["features.4.conv.1.0/conv2d", "features.1.conv.1.0/conv2d"]
    with pytest.raises(ReportError, match="cannot sort by 'maxx': did you mean 'max'"):
        plain.table("maxx")


def test_a_difference_never_says_that_nothing_stands_out_where_values_are_missing() -> None:
    values = [np.random.default_rng(1).uniform(-1, 1, 4000)]
    broken, gone = make(values, {0: {"nans": 3}}), make(values, {0: {"mean": nan}})
    assert diff_profiles(broken, broken).summary().startswith("NaN or infinities, which are left out: 1 tensor; first")
    assert diff_profiles(make(values, {}), gone).summary().startswith("Not compared, no finite value in one of the two")
    absent = make(values, {0: {"count": 0}})
    assert absent.summary().startswith("Without a value: ")


def test_nothing_to_say_is_said() -> None:
    quiet = make([np.random.default_rng(1).uniform(-1, 1, 4000)], {})
    assert quiet.summary().splitlines()[0].startswith("Nothing stands out: no NaN")
    same = diff_profiles(quiet, quiet)
    assert same.summary() == "Nothing stands out: no tensor moved by more than 0.1 σ, and no range is 1.5 × as wide."
    assert "(no rows)" in replace(quiet, rows=()).text()
    assert diff_profiles(quiet, replace(quiet, rows=())).summary() == "The two profiles have no rows in common."


# -- differences -------------------------------------------------------------------------------------------------------


def test_shifts_and_distances_equal_those_of_the_values(difference: ProfileDiff) -> None:
    from scipy.stats import wasserstein_distance

    before, after = arrays()[0], arrays()[0] + 0.5
    found = difference.values[0]
    span = before.max() - before.min()
    assert found.min_shift == pytest.approx(0.5 / span)
    assert found.mean_shift == pytest.approx(0.5 / span)
    assert found.std_shift == pytest.approx(0.0, abs=1e-12)
    assert found.range_ratio == pytest.approx(1.0)
    assert found.largest_shift == pytest.approx(0.5 / span)
    assert found.distance == pytest.approx(wasserstein_distance(before, after) / before.std(), rel=0.02)
    assert found.outside == pytest.approx(np.mean(after > before.max()), abs=2 / 3200)


def test_a_range_inside_the_other_has_nothing_outside(plain: Profile, quantized: Profile) -> None:
    assert diff_profiles(plain, quantized).values[1].outside == 0.0
    far = make([arrays()[0] + 100], {})
    assert diff_profiles(make([arrays()[0]], {}), far).values[0].outside == 1.0


def test_a_constant_that_moves_is_infinitely_far() -> None:
    before, after = make([np.full(4, 2.0)], {}), make([np.full(4, 3.0)], {})
    found = diff_profiles(before, after).values[0]
    assert (found.distance, math.isnan(found.max_shift)) == (math.inf, True)
    assert diff_profiles(before, before).values[0].distance == 0.0


def test_without_histograms_the_ranges_tell(plain: Profile, quantized: Profile) -> None:
    found = diff_profiles(plain, replace(quantized, histograms={}))
    assert math.isnan(found.values[0].distance)
    assert math.isnan(found.values[0].outside)
    assert found.notes == ("no distances: profile both with histograms=True",)
    assert "largest shift first" in found.text(width=120)


def test_what_only_one_has_is_listed(difference: ProfileDiff) -> None:
    assert [(each.side, each.name) for each in difference.only] == [("b", "head/linear")]
    assert "Only in b (1):\n  head/linear, output" in difference.text()


def test_a_value_that_b_quantizes_in_two_ways_is_held_against_the_one_of_a(plain: Profile) -> None:
    twice = replace(plain, rows=(*plain.rows, replace(plain.rows[-1], value=3)))
    found = [each for each in diff_profiles(plain, twice).rows if each.handle == 4 and each.role == "output"]
    assert [(each.a_value, each.b_value) for each in found] == [(4, 4), (4, 3)]


def test_profiles_of_two_models_are_noted(plain: Profile) -> None:
    other = replace(plain, environment=replace(HERE, fingerprint="77aa"))
    assert diff_profiles(plain, other).notes == ("two models: fingerprints 3f2a and 77aa",)
    with pytest.raises(ReportError, match=r"b: got str, expected a Profile, as pt2qa.profile returns it"):
        diff_profiles(plain, "other")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("bins", np.array([2**31 - 1], np.int32), "expected bins from -8160 to 8160"),
        ("bins", np.array([1.0]), "bins are float64 and counts int64, expected int32 and int64"),
        ("counts", np.array([-1]), "and counts from 0 to 9007199254740992 in all"),
        ("counts", np.array([2**62]), "and counts from 0 to 9007199254740992 in all"),
        ("offsets", np.array(0), r"the arrays do not fit 1 values: offsets \(\) end at \[0\]"),
    ],
)
def test_histograms_that_cannot_be_are_refused(name: str, array: Any, message: str) -> None:
    one = make([np.ones(4)], {})
    assert one.histograms["counts"].tolist() == [4]
    with pytest.raises(ReportError, match=message):
        replace(one, histograms={**one.histograms, name: array})


def test_a_value_without_arrays_is_refused(plain: Profile) -> None:
    lost = replace(plain, rows=(replace(plain.rows[0], value=-1), *plain.rows[1:]))
    with pytest.raises(ReportError, match="the profile has no arrays for the value number -1; it has 5"):
        lost.histogram(lost.rows[0])


def test_a_side_that_would_be_a_path_is_refused(plain: Profile) -> None:
    with pytest.raises(
        ReportError, match=r"side: got '\.\./x', expected one of reference, quantized, deployed, before, float, graph"
    ):
        replace(plain, side="../x")


def test_a_negative_variance_has_no_root(plain: Profile) -> None:
    assert np.isnan(replace(plain.rows[0], variance=-1.0).std)
