"""A kind of report is one class: from its fields follow text, table, pandas, CSV, files, diff, gate and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Annotated, ClassVar

import pytest

import pt2qa
import pt2qa._report.storage as storage
from pt2qa._report.base import Listing
from pt2qa._report.html import html_page
from pt2qa._report.prose import share
from pt2qa.errors import ReportError
from pt2qa.report import Environment, Report, column, derived, diff, gate, load, register


@dataclass(frozen=True, slots=True)
class KernelRow:
    """How long a kernel takes, and how far it is from the reference."""

    name: Annotated[str, column(key=True, importance=0, shrinks_to=12)]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=0)]
    time: Annotated[float, column("time\n%", show=share)]
    calls: Annotated[int, column(extended=True)] = 1
    note: Annotated[str, column(optional=True)] = ""


@dataclass(frozen=True, slots=True, repr=False)
class KernelReport(Report):
    """Which kernels run."""

    heading: ClassVar[str] = "Kernels"
    usual_measures: ClassVar[tuple[str, ...]] = ("sqnr",)

    rows: tuple[KernelRow, ...]
    notes: tuple[str, ...]
    model: str
    environment: Environment

    @derived(unit="dB", judged=True)
    def worst_sqnr(self) -> float:
        """The smallest SQNR of a kernel, in dB."""
        return min((row.sqnr for row in self.rows), default=nan)

    def _after(self, limit: int | None) -> Iterator[Listing]:
        yield Listing("Slow", [row.name for row in self.rows if row.time > 0.5])
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        return [f"The worst kernel has {self.worst_sqnr:.1f} dB."]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> KernelReport:
    monkeypatch.setattr(storage, "_KINDS", dict(storage._KINDS))
    register("kernels", schema=1)(KernelReport)
    rows = (KernelRow("conv", 30.0, 0.75), KernelRow("linear", 12.5, 0.25, calls=3))
    return KernelReport(rows, ("on one core",), "Net", Environment.here(""))


def test_it_prints(report: KernelReport) -> None:
    assert str(report) == (
        "Kernels of Net: 2 rows, worst first\n\n"
        "name    SQNR   time\n          dB      %\n------  ----  -----\n"
        "linear  12.5  25.00\nconv    30.0  75.00\n\n"
        "Slow:\n  conv\n\nNotes (1):\n  on one core\n\nThe worst kernel has 12.5 dB."
    )
    assert report.table("calls", width=80).splitlines()[3].split() == ["linear", "3", "12.5", "25.00"]
    with pytest.raises(ReportError, match="cannot sort by 'tme': did you mean 'time'"):
        report.table("tme")


def test_it_becomes_a_data_frame_and_csv(report: KernelReport) -> None:
    assert list(report.to_pandas().columns) == ["name", "sqnr", "time", "note"]
    assert report.csv(extended=True).splitlines()[1:] == ["conv,30.0,0.75,1,", "linear,12.5,0.25,3,"]


def test_it_is_saved_and_loaded(report: KernelReport, tmp_path) -> None:
    report.save(tmp_path / "kernels.safetensors")
    assert load(tmp_path / "kernels.safetensors") == report


def test_it_is_compared_and_gated(report: KernelReport) -> None:
    later = replace(report, rows=(report.rows[0], replace(report.rows[1], sqnr=11.0)))
    found = diff(report, later)
    assert (found.measure, found.unit, found.worst_is) == ("rows.sqnr", "dB", "smallest")
    assert [(row.name, row.loss) for row in found.having("worse")] == [("linear", 1.5)]
    assert not gate(later, require="worst_sqnr>=12 dB").passed
    assert not gate(later, baseline=report, max_drop=1.0).passed
    assert gate(later, baseline=report, max_drop=2.0).passed


def test_it_is_a_section_of_a_page(report: KernelReport) -> None:
    page = html_page(report)
    assert "<h2>Kernels <small>Net</small></h2>" in page
    assert "The worst kernel has 12.5 dB." in page


def test_tensorboard_has_nothing_of_it(report: KernelReport, tmp_path) -> None:
    with pytest.raises(
        ReportError, match="got KernelReport; TensorBoard shows layer, weight and deployed reports, and profiles"
    ):
        pt2qa.write_tensorboard(report, tmp_path)
