"""A session writes each report to its folder, goes on from there, and never touches a file that is not its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pt2qa
from tests.flows import residual_pair
from tests.models import images

BATCHES = [images(seed=seed) for seed in (1, 2, 3)]
Session = Callable[[], pt2qa.QuantAnalysis]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Sessions in one folder, as processes one after the other would make them."""
    return lambda: pt2qa.QuantAnalysis(residual_pair(), BATCHES, out_dir=tmp_path / "analysis", progress=False)


def files(analysis: pt2qa.QuantAnalysis) -> list[str]:
    return sorted(file.name for file in analysis.out_dir.iterdir())


def test_nothing_is_written_before_there_is_a_report(session: Session) -> None:
    analysis = session()
    assert analysis.reports() == {}
    assert analysis.clean() == ()
    assert not analysis.out_dir.exists()


def test_each_step_writes_its_report_and_its_text(session: Session) -> None:
    analysis = session()
    pair = analysis.pair
    bad = analysis.auto_find_bad_case(metric=["sqnr", "l1"], k=2)
    assert bad == pt2qa.find_bad_cases(pair, BATCHES, metric=["sqnr", "l1"], k=2, progress=False)
    layers = analysis.run()
    assert layers.rows == pt2qa.compare_layers(pair, bad.batches(), progress=False).rows
    weights = analysis.compare_weights()
    ranked = analysis.sensitivity(method="exact")
    assert ranked.rows == pt2qa.sensitivity(pair, bad.batches(), method="exact", progress=False).rows
    diagnosis = pt2qa.load(analysis.out_dir / "diagnosis.safetensors")
    assert diagnosis.rows == pt2qa.diagnose(pair, BATCHES, progress=False).rows
    made = {"diagnosis": diagnosis, "bad-cases": bad, "layers": layers, "weights": weights, "sensitivity": ranked}
    names = [f"{what}.{end}" for what in made for end in ("safetensors", "txt", "csv")]
    assert files(analysis) == sorted([*names, "quant-analysis.json"])
    for what, report in made.items():
        assert (analysis.out_dir / f"{what}.txt").read_text() == report.text(limit=None, width=120) + "\n"
        assert (analysis.out_dir / f"{what}.csv").read_text() == report.csv(extended=True)
    kept = analysis.reports()
    assert list(kept) == list(made)
    assert [type(report) for report in kept.values()] == [type(report) for report in made.values()]


def test_the_check_looks_at_all_batches_and_is_the_first_report(session: Session) -> None:
    analysis = session()
    analysis.auto_find_bad_case(k=1)
    findings = analysis.check(silence=["fixed-batch"])
    alone = pt2qa.check(analysis.pair, batches=BATCHES, silence=["fixed-batch"], progress=False)
    assert [row.rule for row in findings] == [row.rule for row in alone]
    assert findings.rules == alone.rules
    assert "layers" in findings.checked
    text = (analysis.out_dir / "findings.txt").read_text()
    parts = [findings.text(limit=None, width=120), pt2qa.annotations(analysis.pair).text(limit=None, width=120)]
    assert text == "\n\n\n".join(parts) + "\n"
    assert "5 modules called once.\nCalled more than once: relu.\n" in text
    assert list(analysis.reports()) == ["findings", "bad-cases"]


def test_another_session_goes_on_from_the_folder(session: Session) -> None:
    first = session().auto_find_bad_case(k=2)
    later = session()
    assert later.load_bad_case() == first
    later.sensitivity(method="exact")
    assert later.run().samples == sum(len(batch) for batch in first.batches())
    assert list(session().reports()) == ["diagnosis", "bad-cases", "layers", "sensitivity"]


def test_without_a_bad_case_all_batches_are_compared(session: Session) -> None:
    analysis = session()
    assert analysis.run().samples == 6
    only = analysis.compare_per_layer(ops=["conv2d"], isolated=False)
    assert [row.name for row in only.rows] == ["conv1/conv2d", "conv2/conv2d"]


def test_one_case_by_its_running_number(session: Session) -> None:
    analysis = session()
    bad = analysis.auto_find_bad_case(k=3)
    row = bad.rows[1]
    assert analysis.run(index=row.index).sqnr == pytest.approx(row.value, abs=1e-4)
    with pytest.raises(pt2qa.ReportError, match=r"no bad case has the index 99; there are: \d, \d, \d"):
        analysis.run(index=99)


def test_a_batch_that_is_known_to_be_bad(session: Session) -> None:
    analysis = session()
    bad = analysis.set_bad_case(BATCHES[1])
    assert torch.equal(bad.batch(), BATCHES[1])
    assert analysis.run(diagnose=False).samples == 2
    assert "bad-cases.safetensors" not in files(analysis)
    analysis.save_bad_case()
    again = session()
    again.load_bad_case(analysis.out_dir / "bad-cases.safetensors")
    assert again.run(diagnose=False) == analysis.run(diagnose=False)
    with pytest.raises(pt2qa.BatchError, match=r"captured with \[2, 3, 8, 8\]"):
        analysis.set_bad_case(images(3))


def test_targets_and_loaders_items(tmp_path: Path) -> None:
    pair = residual_pair()
    items = [(batch, pair.reference(batch).argmax(1)) for batch in BATCHES]
    seen = []

    def softmax(logits: Tensor) -> Tensor:
        seen.append(logits)
        return logits.softmax(1)

    analysis = pt2qa.QuantAnalysis(
        pair, items, out_dir=tmp_path, inputs_of=lambda item: item[0], post_process=softmax, progress=False
    )
    bad = analysis.auto_find_bad_case(iter(items), metric="kl", targets_of=lambda item: item[1], num_steps=2)
    assert (bad.steps, bad.labels[0].ref_right, len(seen)) == (2, 4, 4)
    assert analysis.run().samples > 0


def test_what_is_scored_may_differ_from_call_to_call(session: Session) -> None:
    analysis = session()
    pair = analysis.pair
    bad = analysis.auto_find_bad_case(metric="ATOL", post_process=lambda logits: 100 * logits)
    assert bad.rows[0].value == pytest.approx(100 * pt2qa.find_bad_cases(pair, BATCHES, metric="atol").rows[0].value)
    ranked = analysis.sensitivity(metric="L1", post_process=lambda logits: 100 * logits)
    plain = analysis.sensitivity(metric="L1")
    assert (ranked.metric, plain.metric) == ("l1", "l1")
    assert ranked.rows[0].value == pytest.approx(100 * plain.rows[0].value, rel=1e-4)


def test_an_interrupted_search_has_written_what_it_found(tmp_path: Path) -> None:
    class Interrupted(list[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield BATCHES[0]
            raise KeyboardInterrupt

    analysis = pt2qa.QuantAnalysis(residual_pair(), Interrupted(), out_dir=tmp_path, progress=False)
    found = analysis.auto_find_bad_case()
    assert found.steps == 1
    assert pt2qa.load(tmp_path / "bad-cases.safetensors") == found


def test_a_reconfiguration_is_written_with_its_plan(session: Session) -> None:
    analysis = session()
    report = analysis.reconfigure(target="sqnr>=38")
    assert report.met
    assert pt2qa.OverridePlan.load(analysis.out_dir / "plan.json") == report.plan
    assert list(analysis.reports()) == ["reconfiguration"]
    assert (analysis.out_dir / "reconfiguration.txt").exists()
    assert (analysis.out_dir / "quantizer.py").read_text() == report.code
    assert not [file for file in analysis.clean() if file.exists()]
    assert files(analysis) == []


def test_clean_removes_what_was_written_and_nothing_else(session: Session) -> None:
    analysis = session()
    analysis.compare_weights()
    (analysis.out_dir / "layers.txt").write_text("notes of mine")
    (analysis.out_dir / "model.pt").write_text("weights of mine")
    assert sorted(file.name for file in session().clean()) == [
        "quant-analysis.json",
        "weights.csv",
        "weights.safetensors",
        "weights.txt",
    ]
    assert files(analysis) == ["layers.txt", "model.pt"]


def test_clean_removes_what_a_killed_session_left(session: Session) -> None:
    analysis = session()
    analysis.compare_weights()
    (analysis.out_dir / f".weights.txt.{'0a' * 8}.tmp").write_text("half")
    (analysis.out_dir / ".quant-analysis.lock").touch()
    analysis.clean()
    assert files(analysis) == []
    assert analysis.clean() == ()
    analysis.out_dir.rmdir()
    assert analysis.clean() == ()


def test_a_folder_that_was_cleaned_meanwhile_lists_what_is_written_then(session: Session) -> None:
    analysis = session()
    analysis._claim("weights.safetensors", "weights.txt")
    session().clean()
    with analysis._noted("weights.safetensors"):
        pass
    assert json.loads((analysis.out_dir / "quant-analysis.json").read_text()) == ["weights.safetensors"]


def test_a_file_of_the_users_is_not_overwritten(session: Session) -> None:
    analysis = session()
    analysis.out_dir.mkdir()
    (analysis.out_dir / "weights.safetensors").write_text("a model")
    with pytest.raises(
        pt2qa.ReportError, match=r"weights\.safetensors was not written by QuantAnalysis, and is not ov"
    ):
        analysis.compare_weights()
    assert (analysis.out_dir / "weights.safetensors").read_text() == "a model"
    analysis.run(diagnose=False)
    analysis.run(diagnose=False)


@pytest.mark.parametrize("text", ["{", '["../../model.pt"]', '{"a": 1}', '["/etc/passwd"]'])
def test_a_damaged_list_of_contents_removes_nothing(session: Session, text: str) -> None:
    analysis = session()
    analysis.compare_weights()
    (analysis.out_dir / "quant-analysis.json").write_text(text)
    with pytest.raises(pt2qa.ReportError, match=r"quant-analysis\.json: .*Remove it to start anew"):
        analysis.clean()
    assert "weights.txt" in files(analysis)


def test_what_cannot_be_is_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(pt2qa.BatchError, match=r"batches is of type list_iterator, which can be read only once"):
        pt2qa.QuantAnalysis(residual_pair(), iter(BATCHES), out_dir=tmp_path)
    analysis = session()
    with pytest.raises(pt2qa.ReportError, match=r"no bad case is set\. Call auto_find_bad_case\(\)"):
        analysis.save_bad_case()
    with pytest.raises(pt2qa.ReportError, match=r"bad-cases\.safetensors: no such file"):
        analysis.load_bad_case()
    analysis.compare_weights()
    with pytest.raises(pt2qa.ReportError, match=r"holds WeightReport; expected bad cases"):
        analysis.load_bad_case(analysis.out_dir / "weights.safetensors")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(pt2qa.ReportError, match=r"cannot create the folder .*file: File exists"):
        pt2qa.QuantAnalysis(residual_pair(), BATCHES, out_dir=blocked).compare_weights()


def test_the_list_of_contents_is_readable(session: Session) -> None:
    analysis = session()
    analysis.compare_weights()
    names = json.loads((analysis.out_dir / "quant-analysis.json").read_text())
    assert names == ["weights.csv", "weights.safetensors", "weights.txt"]
    assert repr(analysis).startswith("<QuantAnalysis of Residual by xnnpack, reports in ")
