"""The classes of the accuracy-tuning kit, for scripts that call them, with its printed columns and files.

``prepare`` and ``export`` take the place of the kit's own: there is no march to set, and one call quantizes.
"""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, cast

import torch
from tabulate import tabulate
from torch import nn
from torch.fx import GraphModule

import pt2qa
from pt2qa._report.atomic import make_folder, write_atomic
from pt2qa._report.base import write_text
from pt2qa.compat.numeric_suite import QuantizedModel, captured
from pt2qa.errors import SelectionError

Folder = str | os.PathLike[str]

default_qat_qconfig_setter = default_calibration_qconfig_setter = None
"""What :func:`prepare` takes in the place of a quantizer: that of the name of ``torch.backends.quantized.engine``."""

PROFILE: Final = "profile.safetensors"
"""What a :class:`ModelProfiler` leaves in its folder for :meth:`QuantAnalysis.set_model_profiler_dir`."""

LAYERS: Final = {
    "mod_name": "module",
    "base_op_type": "op",
    "analy_op_type": "op",
    "shape": "shape",
    "quant_dtype": "dtype",
    "qscale": "scale",
    "Cosine": "cosine",
    "L1": "l1",
    "Atol": "atol",
    "max_qscale_diff": "max_lsb",
    "base_model_min": "ref_min",
    "analy_model_min": "quant_min",
    "base_model_max": "ref_max",
    "analy_model_max": "quant_max",
    "base_model_mean": "ref_mean",
    "analy_model_mean": "quant_mean",
}
"""The kit's columns of the layer table, with the fields of :class:`pt2qa.LayerRow`."""

STATISTIC: Final = {
    "Op Name": "op",
    "Mod Name": "module",
    "Attr": "role",
    "Dtype": "dtype",
    "Scale": "scale",
    "Min": "min",
    "Max": "max",
    "Mean": "mean",
    "Var": "variance",
    "Shape": "shape",
}
"""The kit's columns of ``statistic.txt``, with the fields of :class:`pt2qa.ProfileRow`."""


class Metric(str, enum.Enum):
    """What bad cases are ranked by."""

    COSINE = "cosine"
    L1 = "l1"
    ATOL = "atol"


class HbirModel(QuantizedModel):
    """The exported model: what runs are the kernels of the quantizer's backend, wherever its values are looked at."""

    def __getitem__(self, index: Literal[0]) -> HbirModel:
        return self


def prepare(model: nn.Module, example_inputs: Any, qconfig_setter: Any = default_qat_qconfig_setter) -> QuantizedModel:
    """Captures a float model and quantizes it, calibrated on the example inputs.

    Args:
        model: it is not changed.
        example_inputs: a batch, as for :func:`pt2qa.capture`.
        qconfig_setter: a quantizer, as for :func:`pt2qa.quantize`, or :data:`default_qat_qconfig_setter`.
    """
    quantizer = qconfig_setter or torch.backends.quantized.engine
    return QuantizedModel(pt2qa.quantize(captured(model, example_inputs), quantizer, [example_inputs]))


def export(model: QuantizedModel, example_inputs: Any) -> HbirModel:
    """The model as its backend runs it; it is lowered where its values are needed."""
    return HbirModel(_pair_of(model))


def check_qat_model(
    model: Any, example_inputs: Any, save_results: bool = False, out_dir: Folder | None = None
) -> pt2qa.Findings:
    """Prints what :func:`pt2qa.check` finds, and the configuration of each op: :func:`pt2qa.annotations`.

    Args:
        model: what :func:`prepare` returned.
        example_inputs: a batch.
        save_results: whether ``model_check_result.txt`` is written.
        out_dir: where to; None: the working directory.
    """
    pair = _pair_of(model)
    reports = pt2qa.check(pair, batches=[example_inputs], progress=False), pt2qa.annotations(pair)
    print(*reports, sep="\n\n")
    if save_results:
        make_folder(Path(out_dir or "."))
        write_text(Path(out_dir or ".") / "model_check_result.txt", reports)
    return reports[0]


class QuantAnalysis:
    """The kit's session, on one of :class:`pt2qa.QuantAnalysis`, which is its attribute ``session``.

    Args:
        baseline_model: the float model, or for ``"export"`` what :func:`prepare` returned.
        analysis_model: what :func:`prepare` or :func:`export` returned, or a :class:`pt2qa.QuantizedPair`.  Its float
            side is that which it was quantized from, whatever the baseline is.
        analysis_model_type: ``"fake_quant"``; ``"export"`` compares the backend's kernels with the converted graph.
        device_ids: not used: models run where they are.
        post_process: from the model's output to what is scored.
        out_dir: where tables and reports are written; None: the working directory.

    Raises:
        SelectionError: the analysis model is none of these, or of another type than is said.
    """

    def __init__(
        self,
        baseline_model: Any,
        analysis_model: Any = None,
        analysis_model_type: Literal["fake_quant", "export"] = "fake_quant",
        device_ids: Sequence[int] | int | None = None,
        post_process: Callable[[Any], Any] | None = None,
        out_dir: Folder | None = None,
    ) -> None:
        _not_used(device_ids=device_ids)
        model = baseline_model if analysis_model is None else analysis_model
        if isinstance(model, HbirModel) != (analysis_model_type == "export"):
            raise SelectionError(
                f"analysis_model is of type {type(model).__name__} and analysis_model_type is {analysis_model_type!r}; "
                "expected 'export' with what export() returned, else 'fake_quant'"
            )
        self.deployed = analysis_model_type == "export"
        self.out_dir = Path(out_dir or ".")
        self.session = pt2qa.QuantAnalysis(_pair_of(model), [], out_dir=self.out_dir, post_process=post_process)
        self._profiles: tuple[Path, ...] = ()

    def auto_find_bad_case(
        self,
        data_generator: Iterable[Any],
        num_steps: int | None = None,
        metric: str | Metric = Metric.ATOL,
        device: Any = None,
        custom_metric_func: Callable[[Any, Any], Any] | None = None,
        custom_metric_order_seq: Literal["ascending", "descending"] | None = None,
        cached_attrs: Sequence[str] | None = None,
        dump_in_run: bool = False,
    ) -> pt2qa.BadCases:
        """Finds the sample that is worst by ``metric``, and those by the other metrics, in one pass, and prints them.

        Args:
            data_generator: batches.
            num_steps: how many of them are read; None: all.
            metric: a :class:`Metric` or its name.
            device: not used.
            custom_metric_func: from the outputs of both models to a number, in place of ``metric``.
            custom_metric_order_seq: ``"ascending"`` if the smallest number is the worst; else the largest is.
            cached_attrs: state: inputs that get what the output of the batch before has under the same name.
            dump_in_run: not needed: what was found is kept when a search is interrupted.
        """
        _not_used(device=device)
        wanted: Any = [Metric(str(getattr(metric, "value", metric)).lower())]
        wanted = [each.value for each in (*wanted, *(other for other in Metric if other not in wanted))]
        if custom_metric_func is not None:
            worst: Any = "smallest" if custom_metric_order_seq == "ascending" else "largest"
            wanted = pt2qa.CaseMetric("custom", custom_metric_func, worst)
        state = {"feedback": {name: f"output.{name}" for name in cached_attrs}} if cached_attrs else {}
        found = self.session.auto_find_bad_case(data_generator, metric=wanted, num_steps=num_steps, **state)
        print(found)
        return found

    def set_bad_case(
        self, data: Any, baseline_model_cached_attr: Any = None, analysis_model_cached_attr: Any = None
    ) -> None:
        """Sets a batch as the bad case; state is an input of the captured model, and part of the batch."""
        if baseline_model_cached_attr is not None or analysis_model_cached_attr is not None:
            raise SelectionError("cached attributes are inputs of the captured model: pass them within the batch")
        self.session.set_bad_case(data)

    def load_bad_case(self, filename: Folder | None = None) -> None:
        """Sets the bad case that was saved; None: in the folder of this session."""
        self.session.load_bad_case(filename)

    def save_bad_case(self) -> None:
        """Saves the bad case that is set."""
        self.session.save_bad_case()

    def set_model_profiler_dir(
        self, baseline_model_profiler_path: Folder, analysis_model_profiler_path: Folder
    ) -> None:
        """Compares what two :class:`ModelProfiler` have left, in place of running the models."""
        self._profiles = (Path(baseline_model_profiler_path) / PROFILE, Path(analysis_model_profiler_path) / PROFILE)

    def run(self, device: Any = None, index: int | None = None) -> None:
        """Runs both models on the bad cases, or on the one with this index, and writes the table of layers."""
        _not_used(device=device)
        self._write(self._kernels() if self.deployed and index is None else self.session.run(index, diagnose=False))

    def compare_per_layer(self, prefixes: Sequence[str] | None = None, types: Sequence[Any] | None = None) -> Any:
        """Prints and writes ``compare_per_layer_out.txt`` and ``.csv``, and ``abnormal_layer_advisor.txt``.

        Args:
            prefixes: module paths or op names; None: all.
            types: kinds of op, as ``ops=`` of :func:`pt2qa.compare_layers`; None: all.

        Returns:
            The report: of layers, of kernels for ``"export"``, or of the difference of two profiles.

        Raises:
            SelectionError: no bad case is set, or a choice of ops for anything but layers.
        """
        if (prefixes or types) and (self._profiles or self.deployed):
            raise SelectionError("prefixes and types choose layers; the tables of kernels and profiles have all rows")
        if self._profiles:
            older, newer = map(pt2qa.load, self._profiles)
            report: Any = pt2qa.diff_profiles(cast("pt2qa.Profile", older), cast("pt2qa.Profile", newer))
        elif self.deployed:
            report = self._kernels()
        else:
            report = self.session.compare_per_layer(prefixes=prefixes or (), ops=types or ())
        print(self._write(report))
        return report

    def sensitivity(self, device: Any = None, metric: str = "L1", reserve: bool = False) -> list[list[Any]]:
        """Prints and returns ``[op_name, sensitive_type, op_type, metric, quant_dtype, flops]``, the worst first.

        Args:
            device: not used.
            metric: of the output, when only this value is quantized: ``"L1"``, ``"SQNR"`` and so on.
            reserve: not needed: no file is written between.
        """
        _not_used(device=device)
        report = self.session.sensitivity(metric=metric)
        ranked = sorted(report.rows, key=lambda row: row.rank)
        rows: list[list[Any]] = [[row.name, row.kind, row.op, row.value, row.dtype] for row in ranked]
        names = ["op_name", "sensitive_type", "op_type", metric, "quant_dtype", "flops"]
        shares = (f"{row.flops}({row.flops_share:.2%})" for row in ranked)
        print(tabulate([[*cells, share] for cells, share in zip(rows, shares, strict=True)], names))
        return [[*cells, row.flops] for cells, row in zip(rows, ranked, strict=True)]

    def clean(self) -> None:
        """Removes the session's reports; the kit's tables stay."""
        self.session.clean()

    def _kernels(self) -> pt2qa.DeployedReport:
        if self.session.bad_case is None:
            raise SelectionError(
                "no bad case is set; call auto_find_bad_case(data), set_bad_case(batch) or load_bad_case()"
            )
        return pt2qa.compare_deployed(self.session.pair, self.session.bad_case.batches())

    def _write(self, report: Any) -> str:
        """Writes the kit's files of a report, and returns its table."""
        frame = report.to_pandas()
        if isinstance(report, pt2qa.LayerReport):
            frame = frame[list(LAYERS.values())].set_axis(list(LAYERS), axis=1)
        table = tabulate(frame, "keys", "psql")
        make_folder(self.out_dir)
        write_atomic(self.out_dir / "compare_per_layer_out.csv", frame.to_csv())
        write_atomic(self.out_dir / "compare_per_layer_out.txt", f"{table}\n")
        write_atomic(self.out_dir / "abnormal_layer_advisor.txt", f"{report.text(limit=10)}\n")
        return table


class OpRunningInfoManager:
    """What a :class:`ModelProfiler` saw; ``get_info_manager`` and ``get_info_manager()`` are this object."""

    def __init__(self, profiler: ModelProfiler) -> None:
        self.profiler = profiler

    def __call__(self) -> OpRunningInfoManager:
        """For scripts that call ``get_info_manager()``."""
        return self

    def table(
        self,
        out_dir: Folder | None = None,
        prefixes: Sequence[str] | None = None,
        types: Sequence[Any] | None = None,
        with_stack: bool = False,
    ) -> pt2qa.Profile:
        """Prints and writes ``statistic.txt``: each input, output, weight and bias of each op.

        Args:
            out_dir: where to; None: the profiler's folder.
            prefixes: module paths or op names; None: all.
            types: kinds of op; None: all.
            with_stack: whether the line of code that calls the op is a column.
        """
        profile = self.profiler.profile(prefixes, types, with_stack=with_stack)
        frame, columns = profile.to_pandas(), {**STATISTIC, **({"Stack": "source"} if with_stack else {})}
        index = frame["name"].ne(frame["name"].shift()).cumsum() - 1
        text = tabulate(frame[list(columns.values())], ["Index", *columns], "psql", showindex=list(index))
        make_folder(folder := Path(out_dir or self.profiler.out_dir))
        write_atomic(folder / "statistic.txt", f"{text}\n")
        print(text)
        return profile

    def tensorboard(
        self,
        out_dir: Folder | None = None,
        prefixes: Sequence[str] | None = None,
        types: Sequence[Any] | None = None,
        force_per_channel: bool = False,
    ) -> None:
        """Writes histograms: :func:`pt2qa.write_tensorboard`, into the folder ``tensorboard`` of the profiler's."""
        profile = self.profiler.profile(prefixes, types, per_channel=force_per_channel)
        folder = Path(out_dir or self.profiler.out_dir / "tensorboard")
        pt2qa.write_tensorboard(profile, folder, per_channel=force_per_channel)


class ModelProfiler:
    """Profiles the calls of a model within ``with``: :func:`pt2qa.profile` of the inputs, which are kept.

    Args:
        model: a float model, a graph, or what :func:`prepare` or :func:`export` returned.
        out_dir: for ``statistic.txt``, ``tensorboard`` and the saved profile.
    """

    def __init__(self, model: nn.Module, out_dir: Folder) -> None:
        self.model, self.out_dir = model, Path(out_dir)
        self.calls: list[Any] = []
        self._subject: Any = None

    def __enter__(self) -> ModelProfiler:
        self._hook = self.model.register_forward_pre_hook(lambda _, inputs: self.calls.append(inputs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        if kind is None:
            make_folder(self.out_dir)
            self.profile().save(self.out_dir / PROFILE)

    @property
    def get_info_manager(self) -> OpRunningInfoManager:
        """Tables and histograms of what was seen."""
        return OpRunningInfoManager(self)

    def profile(
        self, prefixes: Sequence[str] | None = None, types: Sequence[Any] | None = None, **options: Any
    ) -> pt2qa.Profile:
        """The profile of all calls; arguments as :func:`pt2qa.profile` has them.

        Raises:
            BatchError: the model was not called.
        """
        if not self.calls:
            raise pt2qa.BatchError("the model was not called within the profiler's with block")
        if isinstance(self.model, QuantizedModel):
            options["side"] = "deployed" if isinstance(self.model, HbirModel) else "quantized"
            self._subject = self.model.pair
        elif self._subject is None:
            self._subject = self.model if isinstance(self.model, GraphModule) else captured(self.model, self.calls[0])
        return pt2qa.profile(self._subject, self.calls, prefixes=prefixes or (), ops=types or (), **options)


Profiler = HbirModelProfiler = ModelProfiler


def _pair_of(model: Any) -> pt2qa.QuantizedPair:
    pair = model.pair if isinstance(model, QuantizedModel) else model
    if not isinstance(pair, pt2qa.QuantizedPair):
        raise SelectionError(
            f"the quantized model is of type {type(model).__name__}; expected what prepare() or export() of "
            "pt2qa.compat.tuning_kit returned, or a QuantizedPair"
        )
    return pair


def _not_used(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            warnings.warn(f"{name}={value!r} is not used: models run where they are", stacklevel=3)
