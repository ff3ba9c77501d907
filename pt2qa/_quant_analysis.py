"""A whole debugging session as one object: each step writes its report to one folder, and the next builds on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from pt2qa._annotations import listing
from pt2qa._bad_cases.report import BadCases
from pt2qa._bad_cases.search import find_bad_cases
from pt2qa._check.analysis import check
from pt2qa._check.report import Findings
from pt2qa._deployed.analysis import compare_deployed
from pt2qa._deployed.report import DeployedReport
from pt2qa._diagnosis.analysis import diagnose
from pt2qa._diagnosis.report import Diagnosis
from pt2qa._layers.analysis import compare_layers
from pt2qa._layers.report import LayerReport
from pt2qa._printable import clean
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._reconfigure.analysis import reconfigure
from pt2qa._reconfigure.report import Reconfiguration
from pt2qa._report.atomic import locked, make_folder, remove_abandoned, write_atomic
from pt2qa._report.base import Report, write_text
from pt2qa._sensitivity.analysis import sensitivity
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Mask
from pt2qa._trials.treatment import Target
from pt2qa._weights.analysis import compare_weights
from pt2qa._weights.report import WeightReport
from pt2qa.errors import BatchError, ReportError
from pt2qa.report import load

ReportType = TypeVar("ReportType", bound=Report)

BAD_CASES: Final = "bad-cases"
REPORTS: Final = ("diagnosis", "findings", BAD_CASES, "layers", "weights", "deployed", "sensitivity", "reconfiguration")
"""What a folder may contain, in session order."""

PLAN: Final = "plan.json"
CODE: Final = "quantizer.py"
CONTENTS: Final = "quant-analysis.json"
"""Lists the files that were written here, so that no other file is ever overwritten or removed."""

LOCK: Final = ".quant-analysis.lock"
"""Exists while a process writes to the folder."""


def _files_of(what: str) -> tuple[str, str, str]:
    return f"{what}.safetensors", f"{what}.txt", f"{what}.csv"


_FILES: Final = frozenset({*(name for what in REPORTS for name in _files_of(what)), PLAN, CODE})


class QuantAnalysis:
    """Checks, finds bad cases, compares on them, ranks sites and searches for a better configuration, on one pair.

    Every method calls the function of pt2qa that does the work, writes ``<what>.safetensors``, ``<what>.txt`` and
    ``<what>.csv`` (all rows) to ``out_dir``, and returns the report.  It raises what that function raises, and
    :class:`pt2qa.ReportError` if the folder cannot be written.  Another process can continue from the folder:
    :meth:`load_bad_case`, :meth:`reports`.  Several processes may use one folder at the same time.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: the data: a list, or a loader that can be iterated repeatedly.
        out_dir: folder for the reports; created when the first one is written.
        inputs_of: from an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        post_process: from the model's output to what is scored, for :meth:`auto_find_bad_case` and
            :meth:`sensitivity`.
        mask: which positions count, as in :func:`pt2qa.compare_layers`, for every step that measures; :meth:`check`
            looks at all of them.
        progress: whether to show progress bars; None: only if stderr is a terminal.

    Raises:
        SelectionError: ``pair`` is not a pair.
        BatchError: ``batches`` can be read only once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     analysis = pt2qa.QuantAnalysis(pair, [x], out_dir=folder, progress=False)
    ...     weights = analysis.compare_weights()
    ...     list(analysis.reports())
    ['weights']
    """

    def __init__(
        self,
        pair: QuantizedPair,
        batches: Iterable[Any],
        *,
        out_dir: str | os.PathLike[str],
        inputs_of: Callable[[Any], Batch] | None = None,
        post_process: Callable[[Any], Any] | None = None,
        mask: Mask | None = None,
        progress: bool | None = None,
    ) -> None:
        check_pair(pair)
        if isinstance(batches, Iterator):
            raise BatchError(
                f"batches is of type {type(batches).__name__}, which can be read only once, but each step needs the "
                "batches again. Pass a list, or a loader that starts over."
            )
        self.pair = pair
        self.batches = batches
        self.out_dir = Path(out_dir)
        self.inputs_of = inputs_of
        self.post_process = post_process
        self.mask = mask
        self.progress = progress
        self.bad_case: BadCases | None = None

    def check(self, **options: Any) -> Findings:
        """Checks structure, annotation and numbers on all batches: :func:`pt2qa.check`.

        The text also has the configuration of every op and the calls of each module: :func:`pt2qa.annotations`.

        Args:
            options: ``model``, ``cpu``, ``rules``, ``silence`` and so on of :func:`pt2qa.check`.
        """
        self._claim(*_files_of("findings"))
        findings = check(self.pair, batches=self.batches, inputs_of=self.inputs_of, progress=self.progress, **options)
        self._write("findings", findings, listing.annotations(self.pair))
        return findings

    # -- bad cases -----------------------------------------------------------------------------------------------

    def auto_find_bad_case(self, batches: Iterable[Any] | None = None, **options: Any) -> BadCases:
        """Finds the samples that lose most, and sets them as bad cases: :func:`pt2qa.find_bad_cases`.

        Args:
            batches: items like the session's batches, which are the default; an iterator will do.
            options: ``metric``, ``k``, ``num_steps``, ``targets_of`` and so on of :func:`pt2qa.find_bad_cases`;
                ``post_process`` is the session's by default.
        """
        self._claim(*_files_of(BAD_CASES))
        data = {**self._every_batch(), "batches": self.batches if batches is None else batches}
        self.bad_case = find_bad_cases(self.pair, **{**data, "post_process": self.post_process, **options})
        return self.save_bad_case()

    def set_bad_case(self, batch: Batch) -> BadCases:
        """Sets a batch of model inputs that is known to be bad.  :meth:`save_bad_case` keeps it.

        Returns:
            The batch as a report, with its SQNR.

        Raises:
            BatchError: it does not fit the captured inputs.
        """
        data = {**self._every_batch(), "batches": [batch], "inputs_of": None}
        self.bad_case = find_bad_cases(self.pair, **data, post_process=self.post_process, batch_axis=None)
        return self.bad_case

    def save_bad_case(self) -> BadCases:
        """Writes the bad cases that are set; :meth:`auto_find_bad_case` does so by itself.

        Raises:
            ReportError: none is set, or the folder cannot be written.
        """
        if self.bad_case is None:
            raise ReportError("no bad case is set. Call auto_find_bad_case(), set_bad_case(batch) or load_bad_case().")
        self._write(BAD_CASES, self.bad_case)
        return self.bad_case

    def load_bad_case(self, path: str | os.PathLike[str] | None = None) -> BadCases:
        """Sets the bad cases from a file.

        Args:
            path: a report of bad cases; None for the one in the folder.

        Raises:
            ReportError: there is none, or it is damaged or of another kind.
        """
        path = self.out_dir / _files_of(BAD_CASES)[0] if path is None else Path(path)
        loaded = load(path)
        if not isinstance(loaded, BadCases):
            raise ReportError(f"{path}: holds {type(loaded).__name__}; expected bad cases")
        self.bad_case = loaded
        return loaded

    # -- analyses ------------------------------------------------------------------------------------------------

    def run(self, index: int | None = None, *, diagnose: bool = True) -> LayerReport:
        """Diagnoses on all batches, then compares all layers on the bad cases, or on all batches if none is set.

        See :meth:`diagnose` and :func:`pt2qa.compare_layers`; ``reports()["diagnosis"]`` is to be read first.

        Args:
            index: only the layers on the bad case with this index.
            diagnose: whether to diagnose.

        Raises:
            ReportError: there is no such case.
        """
        if index is None:
            if diagnose:
                self.diagnose()
            return self.compare_per_layer()
        rows = () if self.bad_case is None else self.bad_case.rows
        row = next((row for row in rows if row.index == index), None)
        if self.bad_case is None or row is None:
            known = ", ".join(map(str, sorted({row.index for row in rows}))) or "none"
            raise ReportError(f"no bad case has the index {index}; there are: {known}")
        batches = [self.bad_case.batch(row)]
        return self._written("layers", compare_layers, batches=batches, mask=self.mask, progress=self.progress)

    def diagnose(self, **options: Any) -> Diagnosis:
        """Finds what causes the error on all batches, and measures what helps: :func:`pt2qa.diagnose`.

        Args:
            options: ``evaluation``, ``metric``, ``target``, ``deployed`` and so on of :func:`pt2qa.diagnose`.
        """
        return self._written("diagnosis", diagnose, **self._every_batch(), **options)

    def compare_per_layer(self, **options: Any) -> LayerReport:
        """Compares layers on the bad cases, or on all batches if none is set.

        Args:
            options: ``prefixes``, ``ops``, ``modules``, ``isolated``, ``metrics`` of :func:`pt2qa.compare_layers`.
        """
        return self._written("layers", compare_layers, **self._data(), **options)

    def compare_weights(self) -> WeightReport:
        """Compares all weights: :func:`pt2qa.compare_weights`."""
        return self._written("weights", compare_weights)

    def compare_deployed(self, **options: Any) -> DeployedReport:
        """Compares the kernels that ship with the converted graph on all batches: :func:`pt2qa.compare_deployed`.

        Args:
            options: ``backend``, ``deployed``, ``program`` of :func:`pt2qa.compare_deployed`.
        """
        return self._written("deployed", compare_deployed, **self._every_batch(), **options)

    def sensitivity(self, **options: Any) -> SensitivityReport:
        """Ranks activations and weights on the bad cases, or on all batches if none is set.

        Args:
            options: ``method``, ``metric`` and so on of :func:`pt2qa.sensitivity`.
        """
        options = {"post_process": self.post_process, **options}
        return self._written("sensitivity", sensitivity, **self._data(), **options)

    def reconfigure(self, *, target: Target | float | str | None = None, **options: Any) -> Reconfiguration:
        """Searches for a configuration that meets a target on all batches: :func:`pt2qa.reconfigure`.

        The plan is written too, as ``plan.json``, and the code that quantizes so, as ``quantizer.py``; the new pair is
        ``report.pair``.

        Args:
            target: dB such as ``30``, ``"sqnr>=30"``, or a :class:`pt2qa.Target`.
            options: ``budget``, ``fallback``, ``calibration`` and so on, as there.
        """
        self._claim(PLAN, CODE)
        report = self._written("reconfiguration", reconfigure, **self._every_batch(), target=target, **options)
        with self._noted(PLAN, CODE):
            report.plan.save(self.out_dir / PLAN)
            report.save_code(self.out_dir / CODE)
        return report

    # -- the folder ----------------------------------------------------------------------------------------------

    def reports(self) -> dict[str, Report]:
        """The reports in the folder by name, in session order.

        Raises:
            ReportError: one is damaged.
        """
        written = self._contents()
        files = {what: _files_of(what)[0] for what in REPORTS}
        paths = {what: self.out_dir / name for what, name in files.items() if name in written}
        return {what: load(path) for what, path in paths.items() if path.exists()}

    def clean(self) -> tuple[Path, ...]:
        """Removes what was written to the folder, here or by an earlier session, and no other file.

        Returns:
            The files that were removed.

        Raises:
            ReportError: the list of what was written is damaged, or the disk refuses.
        """
        if not self.out_dir.is_dir():
            return ()
        with locked(self.out_dir / LOCK):
            names = [*sorted(self._contents()), CONTENTS]
            files = [self.out_dir / name for name in names if (self.out_dir / name).exists()]
            try:
                for file in files:
                    file.unlink()
            except OSError as error:
                raise ReportError(f"cannot remove a report: {error}") from error
            for name in names:
                remove_abandoned(self.out_dir / name)
        return tuple(files)

    def _every_batch(self) -> dict[str, Any]:
        return {"batches": self.batches, "inputs_of": self.inputs_of, "mask": self.mask, "progress": self.progress}

    def _data(self) -> dict[str, Any]:
        """The bad cases, or all batches if none is set."""
        if self.bad_case is None:
            return self._every_batch()
        return {"batches": self.bad_case.batches(), "mask": self.mask, "progress": self.progress}

    def _written(self, what: str, analysis: Callable[..., ReportType], **options: Any) -> ReportType:
        self._claim(*_files_of(what))
        report = analysis(self.pair, **options)
        self._write(what, report)
        return report

    def _write(self, what: str, *reports: Report) -> None:
        """Writes a report, and into its text those that follow it."""
        binary, plain, csv = _files_of(what)
        with self._noted(binary, plain, csv):
            reports[0].save(self.out_dir / binary)
            reports[0].to_csv(self.out_dir / csv, extended=True)
            write_text(self.out_dir / plain, reports)

    def _claim(self, *names: str) -> None:
        """Records files as ours before the work begins; an existing file that is not ours is left alone."""
        with self._noted(*names):
            pass

    @contextmanager
    def _noted(self, *names: str) -> Iterator[None]:
        """Records files as ours, and holds the folder's lock while they are written.

        They are recorded again when they are written, since another process may have cleaned the folder in between.
        """
        make_folder(self.out_dir)
        with locked(self.out_dir / LOCK):
            written = self._contents()
            for name in names:
                if name not in written and (self.out_dir / name).exists():
                    raise ReportError(
                        f"{self.out_dir / name} was not written by QuantAnalysis, and is not overwritten. Choose "
                        "another out_dir, or move the file."
                    )
            if not written.issuperset(names):
                contents = json.dumps(sorted({*written, *names}), indent=1)
                write_atomic(self.out_dir / CONTENTS, f"{contents}\n")
            yield

    def _contents(self) -> set[str]:
        file = self.out_dir / CONTENTS
        if not file.exists():
            return set()
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReportError(f"{file}: cannot be read ({error}). Remove it to start anew.") from error
        # Known names only: whatever a damaged list says, nothing outside the folder is touched.
        if not isinstance(names, list) or not all(isinstance(name, str) and name in _FILES for name in names):
            raise ReportError(f"{file}: does not list files of QuantAnalysis. Remove it to start anew.")
        return set(names)

    def __repr__(self) -> str:
        return clean(f"<QuantAnalysis of {self.pair.model} by {self.pair.quantizer}, reports in {self.out_dir}>")
