"""``pt2qa init`` writes a flow file that works, and asks for what it cannot see."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from pt2qa.cli import main
from pt2qa.cli.flow import load_flow

NET = """
import torch
from torch import nn
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
    def forward(self, x):
        return self.linear(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
    def forward(self, x):
        return self.part(x)
class Named(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, at): return {"x": torch.full((4,), float(at)), "label": at % 3}
named = Named()
def loader():
    data = torch.utils.data.TensorDataset(torch.rand(40, 4), torch.arange(40) % 3)
    return torch.utils.data.DataLoader(data, batch_size=8)
"""


class Classifier(nn.Module):
    """Takes and returns what a model of transformers does."""

    config = types.SimpleNamespace(vocab_size=50)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        words = self.words(input_ids) * attention_mask.unsqueeze(-1)
        return types.SimpleNamespace(logits=self.linear(words.mean(1)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("own_net.py").write_text(NET, encoding="utf-8")
    yield lambda *args, **given: CliRunner().invoke(main, ["init", *args], prog_name="pt2qa", **given)
    sys.modules.pop("own_net", None)


def test_arrays_with_labels_are_split_and_give_an_accuracy(run: Callable[..., Any]) -> None:
    x, y = np.random.default_rng(0).random((40, 4), np.float32), np.arange(40) % 3
    np.savez("data.npz", y=y, x=x)
    result = run("own_net.py", "--data", "data.npz")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-2:] == ["Next:", "pt2qa analyze flow.py -o reports"]
    flow = load_flow("flow.py")
    assert flow.args[0].shape == (20, 4)
    measured, calibrating = (torch.cat(list(part)) for part in (flow.evaluation, flow.batches))
    assert torch.equal(torch.cat([measured, calibrating]).sort(0).values, torch.from_numpy(x).sort(0).values)
    right = np.mean(
        [int(flow.model(torch.from_numpy(x[i])).argmax()) == y[i] for i in range(40) if x[i] in measured.numpy()]
    )
    assert flow.metric is not None
    assert flow.metric(flow.model) == pytest.approx(100 * right)
    assert f"Accuracy of the float model: {100 * right:.2f} %" in result.stdout
    labels = {float(sample): int(label) for sample, label in zip(x[:, 0], y, strict=True)}
    assert flow.labelled is not None
    for batch, label in flow.labelled:
        assert [labels[float(sample)] for sample in batch[:, 0]] == label.tolist()


@pytest.mark.parametrize(("source", "form"), [("own_net.py:named", dict), ("own_net.py:loader", tuple)])
def test_datasets_and_loaders_of_a_file_are_data(run: Callable[..., Any], source: str, form: type) -> None:
    assert run("own_net.py:Net", "--data", source, "-o", "other.py").exit_code == 0
    flow = load_flow("other.py")
    assert flow.metric is not None
    assert 0 <= flow.metric(flow.model) <= 100
    assert bool(flow.kwargs) == (form is dict)


def test_weights_need_a_class_and_may_be_nested(run: Callable[..., Any]) -> None:
    sys.path.insert(0, ".")
    weights = {f"part.linear.{name}": torch.ones(size) for name, size in (("weight", (3, 4)), ("bias", (3,)))}
    torch.save({"epoch": 3, "state_dict": weights}, "net.pt")
    assert (
        "pt2qa: cannot see which class the weights in net.pt are for, as FILE.py:CLASS: give --model"
        in run("net.pt").stderr
    )
    assert run("net.pt", "--model", "own_net:Net").exit_code == 0
    assert all(torch.equal(value, weights[name]) for name, value in load_flow("flow.py").model.state_dict().items())


def test_without_data_the_inputs_are_random_which_is_said(run: Callable[..., Any]) -> None:
    result = run("own_net.py")
    assert "flow.py has random numbers as data" in result.stderr
    assert "own_net.py has the weights that it starts with" in result.stderr
    flow = load_flow("flow.py")
    assert (flow.args[0].shape, flow.metric) == ((32, 4), None)
    first = flow.model.state_dict()["part.linear.weight"]
    assert torch.equal(load_flow("flow.py").model.state_dict()["part.linear.weight"], first)


def test_a_file_is_not_overwritten_without_being_told(run: Callable[..., Any]) -> None:
    Path("flow.py").write_text("mine", encoding="utf-8")
    result = run("own_net.py")
    assert (result.exit_code, result.stderr.splitlines()) == (
        2, ["pt2qa: flow.py exists: give --force to replace it, or another name with -o"],
    )  # fmt: skip
    assert Path("flow.py").read_text(encoding="utf-8") == "mine"
    assert run("own_net.py", "--force").exit_code == 0


def test_what_cannot_be_seen_is_an_option(run: Callable[..., Any]) -> None:
    Path("two.py").write_text("from torch import nn\na, b = nn.ReLU(), nn.Tanh()\n", encoding="utf-8")
    assert "cannot see which name in two.py is the model (it has a, b): give two.py:NAME" in run("two.py").stderr
    assert "cannot see the size of one input of ReLU, as 3x224x224: give --input" in run("two.py:a").stderr
    assert run("two.py:a", "--input", "3x5").exit_code == 0
    assert load_flow("flow.py").args[0].shape == (32, 3, 5)
    assert "two.py has no 'c' for the model; it has a, b" in run("two.py:c", "--force").stderr
    assert "gone.py: no such file" in run("gone.py", "--force").stderr
    assert "--model goes with a file of weights" in run("two.py", "--model", "two.py:a", "--force").stderr
    sys.modules.pop("two", None)


def test_a_terminal_is_asked(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def terminal() -> types.SimpleNamespace:
        return types.SimpleNamespace(isatty=lambda: True)

    monkeypatch.setattr("pt2qa.cli.starting.sys", types.SimpleNamespace(stdin=terminal(), path=sys.path))
    monkeypatch.setattr("click.prompt", lambda text: {"Which name in two.py is the model (it has a, b)": "b"}[text])
    Path("two.py").write_text("from torch import nn\na, b = nn.Linear(2, 3), nn.Linear(4, 3)\n", encoding="utf-8")
    assert run("two.py").exit_code == 0
    assert load_flow("flow.py").args[0].shape == (32, 4)
    sys.modules.pop("two", None)


def test_folders_that_are_not_the_models_classes_give_no_accuracy(run: Callable[..., Any]) -> None:
    text = "named.classes = ['a', 'b']\n"
    Path("own_net.py").write_text(
        NET.replace('{"x": ', "(").replace(', "label": at % 3}', ", at % 3)") + text, encoding="utf-8"
    )
    result = run("own_net.py:Net", "--data", "own_net.py:named")
    assert "own_net.py:named has 2 classes and the model 3, so no accuracy is measured" in result.stderr
    assert load_flow("flow.py").metric is None


def test_models_of_a_package_come_with_their_weights(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def create_model(name: str, pretrained: bool) -> nn.Module:
        made.append((name, pretrained))
        return nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    timm = types.ModuleType("timm")
    timm.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert run("timm:small").exit_code == 0
    assert set(made) == {("small", True)}
    assert load_flow("flow.py").args[0].shape == (32, 3, 224, 224)
    transformers = types.ModuleType("transformers")
    transformers.AutoModelForSequenceClassification = types.SimpleNamespace(from_pretrained=Classifier)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    result = run("transformers:tiny", "-o", "words.py")
    assert result.exit_code == 0, result.output
    flow = load_flow("words.py")
    assert flow.kwargs["input_ids"].shape == (32, 64)
    assert flow.model(**flow.kwargs).shape == (32, 2)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert (
        "timm.create_model('small', pretrained=True) fails: ModuleNotFoundError" in run("timm:small", "--force").stderr
    )


def test_a_class_with_arguments_is_made_by_a_function(run: Callable[..., Any]) -> None:
    sized = "class Sized(Net):\n    def __init__(self, width):\n        super().__init__()\n"
    Path("sized.py").write_text(f"{NET}{sized}def made():\n    return Sized(4)\n")
    result = run("sized.py:Sized")
    assert result.exit_code == 2
    assert "sized.py:Sized needs arguments (missing a required argument: 'width'): name a function" in result.stderr
    assert run("sized.py:made").exit_code == 0
    assert type(load_flow("flow.py").model).__name__ == "Sized"


def test_arrays_of_numpys_own_dtype_become_the_models(run: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).random((40, 4))
    np.savez("data.npz", x=x, y=np.arange(40) % 3)
    assert run("own_net.py", "--data", "data.npz").exit_code == 0
    flow = load_flow("flow.py")
    rows = torch.cat([*flow.batches, *flow.evaluation])
    assert torch.equal(rows.sort(0).values, torch.from_numpy(x).float().sort(0).values)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model."])
def test_weights_under_the_name_of_a_wrapper_are_loaded(run: Callable[..., Any], prefix: str) -> None:
    weights = {f"part.linear.{name}": torch.ones(size) for name, size in (("weight", (3, 4)), ("bias", (3,)))}
    torch.save({"state_dict": {prefix + name: value for name, value in weights.items()}}, "net.pt")
    result = run("net.pt", "--model", "own_net.py")
    assert result.exit_code == 0, result.output
    assert all(torch.equal(value, weights[name]) for name, value in load_flow("flow.py").model.state_dict().items())


def test_a_file_with_more_than_weights_is_not_run(run: Callable[..., Any]) -> None:
    torch.save(nn.Linear(4, 3), "whole.pt")
    assert (
        "pt2qa: whole.pt holds more than weights, and reading that could run code: give the file that "
        "torch.save(model.state_dict(), FILE) writes" in run("whole.pt", "--model", "own_net.py").stderr
    )


class Columns(torch.utils.data.Dataset[dict[str, Any]]):
    """Named as a Hugging Face dataset names its columns, and in its form."""

    def __init__(self, tensors: bool = False) -> None:
        self.tensors = tensors

    def with_format(self, kind: str) -> Columns:
        return Columns(kind == "torch")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> dict[str, Any]:
        row = [float(at)] * 4
        return {"image": torch.tensor(row) if self.tensors else row, "file": f"{at}.png", "label": at % 3}


def test_columns_that_forward_does_not_name_go_by_position(run: Callable[..., Any]) -> None:
    sys.modules["columns"] = types.ModuleType("columns")
    sys.modules["columns"].rows = Columns()  # type: ignore[attr-defined]
    try:
        result = run("own_net.py", "--data", "columns:rows")
        assert result.exit_code == 0, result.output
        flow = load_flow("flow.py")
        assert flow.labelled is not None
        for batch, label in flow.labelled:
            assert (batch == batch[:, :1]).all()
            assert torch.equal(batch[:, 0] % 3, label.float())
    finally:
        del sys.modules["columns"]


def test_columns_that_forward_lacks_are_left_out(run: Callable[..., Any]) -> None:
    Path("own_net.py").write_text(NET.replace('"label": at', '"id": at, "label": at'), encoding="utf-8")
    assert run("own_net.py:Net", "--data", "own_net.py:named").exit_code == 0
    assert list(load_flow("flow.py").kwargs) == ["x"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["net.pt2"], "net.pt2 is no Python module, and no file or folder that pt2qa init takes for the model"),
        (["own_net.py", "--data", "pictures"], "pictures is no Python module, and no file or folder that"),
        (["own_net.py", "--data", "gone.npz"], "gone.npz: no such file"),
    ],
)
def test_what_is_not_there_is_said_plainly(run: Callable[..., Any], given: list[str], says: str) -> None:
    assert f"pt2qa: {says}" in run(*given).stderr
