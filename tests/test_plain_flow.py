"""The printed code, executed in a fresh namespace in a flow of its own, makes the pair's quantized graph."""

from __future__ import annotations

import copy
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import pt2qa
from pt2qa import Edit, OverridePlan, SelectionError
from pt2qa._quantize.plain_flow import PlainFlow, plain_flow, recorded, rewriting_code
from pt2qa.overrides.plan import in_base64
from pt2qa.plugins.code import needed, needed_imports
from tests.models import InPlaceViews, Loop, images


class NoGrad(nn.Module):
    """Half of it is in a region that torch.export puts into a nested graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.relu(self.a(x))
        result: Tensor = self.b(y)
        return result


class Twice(nn.Module):
    """A convolution and a ReLU module, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(self.relu(self.conv(x))))
        result: Tensor = self.fc(y.mean((2, 3)))
        return result


class Functional(nn.Module):
    """A functional and an in-place ReLU, a convolution that no module calls, and one with its padding in words."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, self.weight))
        y = F.relu_(self.bn(self.conv(y))) + y
        result: Tensor = self.fc(y.mean((2, 3)))
        return result


class Unread(Twice):
    """Nothing reads the result of a linear."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(x)).mean((2, 3))
        self.fc(y).relu_()
        result: Tensor = self.fc(y)
        return result


class Sums(Twice):
    """Python's sum starts from zero."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.fc(sum([self.relu(y), y]).mean((2, 3)))  # type: ignore[no-any-return]


class Rated(Twice):
    """A convolution in a region of its own, and constants in it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            y = self.relu(self.conv(x)) * torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
        result: Tensor = self.fc(y.mean((2, 3)))
        return result


class Counted(NoGrad):
    """Looks up a row at an index that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.argmax(x.abs().sum(1)).reshape(1) + 1 - 1
        y = self.a(x)
        result: Tensor = self.b(y + y.index_select(0, index))
        return result


class Keywords(nn.Module):
    """Takes a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        result: Tensor = self.out(torch.relu(self.fc(x)) * scale)
        return result


class Attention(nn.Module):
    """Self-attention of torch, between linears."""

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.fc, self.attn = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        mask = torch.full((5, 5), -1e9).triu(1) if self.masked else None
        result: Tensor = self.attn(y, y, y, need_weights=self.masked, attn_mask=mask)[0]
        return result


class Masked(nn.Module):
    """Attention as one op, with a mask or without."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.fc, self.masked = nn.Linear(8, 8), masked

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.fc(x), torch.full((5, 5), -1e9).triu(1) if self.masked else None
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)


class Recurrent(nn.Module):
    """A recurrent layer before a linear."""

    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cell, self.fc = cell(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.cell(x)[0])
        return result


class Nested(nn.Module):
    """Modules with dots and digits in their paths."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6())
        self.features = nn.Sequential(block, nn.ModuleDict({"1x1": nn.Conv2d(4, 4, 1)})["1x1"])
        self.blocks = nn.ModuleDict({"0": nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks["0"](self.features(x)).mean((2, 3))
        return result


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def flow_of(model: nn.Module, example: Any, quantizer: Any, *edits: Edit, **options: Any) -> PlainFlow:
    torch.manual_seed(0)
    captured = {
        name: options.pop(name) for name in ("kwargs", "dynamic_shapes", "strict", "decompose") if name in options
    }
    batches = options.pop("batches", [example])
    capture = pt2qa.capture(model.eval(), example, **captured)
    plan = OverridePlan(edits)
    pair = pt2qa.quantize(capture, quantizer, batches, overrides=plan, progress=False, **options)
    return plain_flow(pair, progress=False)


REWRITTEN = [
    pytest.param(NoGrad, x(4, 8), Edit("float", ("a/linear",)), "xnnpack", "nested region", id="no_grad-xnnpack"),
    pytest.param(NoGrad, x(4, 8), None, "x86", "nested region", id="no_grad-x86"),
    pytest.param(Twice, images(), Edit("float", ("conv/conv2d_1",)), "x86", "shared module", id="twice-x86"),
    pytest.param(Twice, images(), None, "xnnpack", "", id="twice-xnnpack"),
    pytest.param(Functional, images(), Edit("float", ("fc/linear",)), "xnnpack", "", id="functional-xnnpack"),
    pytest.param(Functional, images(), None, "x86", "padding, op source", id="functional-x86"),
    pytest.param(Counted, x(4, 8), None, "xnnpack", "scalar", id="scalar-xnnpack"),
    pytest.param(InPlaceViews, images(), None, "xnnpack", "partial write", id="writes-xnnpack"),
    pytest.param(InPlaceViews, images(), None, "x86", "", id="writes-x86"),
]


@pytest.mark.parametrize(("model", "example", "edit", "quantizer", "needed"), REWRITTEN)
def test_rewriting_is_added_where_it_is_needed(
    model: Callable[[], nn.Module], example: Tensor, edit: Edit | None, quantizer: str, needed: str
) -> None:
    torch.manual_seed(0)
    flow = flow_of(model(), example, quantizer, *([] if edit is None else [edit]))
    assert flow.equal, flow.verified
    assert flow.verified.startswith(f"equal, with capture's rewriting ({needed}); without it: " if needed else "equal")
    assert "import pt2qa" not in flow.code
    assert ("def rewrite" in flow.code) == bool(needed.replace("partial write", ""))


PASSES = {
    "nested region": (NoGrad(), x(4, 8)),
    "nested region, nested": (Rated(), images()),
    "shared module": (Twice(), images()),
    "padding": (Functional(), images()),
    "dead code": (Unread(), images()),
    "add of zero": (Sums(), images()),
    "scalar": (Counted(), x(4, 8)),
    "op source": (Attention(), x(2, 5, 8)),
    "attention": (Attention(), x(2, 5, 8)),
    "attention, masked": (Attention(masked=True), x(2, 5, 8)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", PASSES)
def test_the_code_does_what_the_passes_do(case: str, strict: bool) -> None:
    model, example = PASSES[case]
    decompose = ("attention",) if case.startswith("attention") else ()
    capture = pt2qa.capture(model.eval(), example, strict=strict, decompose=decompose)
    assert case.partition(",")[0] in {change.rule for change in capture.changes} | {"op source"}
    names: dict[str, Any] = {}
    code = rewriting_code(capture, {*recorded(capture), "op source"})
    body = needed(code, ("rewrite",))
    exec("\n".join([*needed_imports([], body), *body]), names)
    graph_module = torch.export.export(model, (example,), strict=strict).module()
    names["rewrite"](graph_module)
    assert ops_of(graph_module) == ops_of(capture.module())
    assert torch.equal(graph_module(example), capture.module()(example))


def ops_of(graph_module: torch.fx.GraphModule) -> list[tuple[str, str, int]]:
    """Each op with what quantizers match it by, and which ops are matched with it."""
    ops = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    sources = [node.meta.get("source_fn_stack", [("", "")])[0] for node in ops]
    labels = [label for label, _ in sources]
    return [
        (str(node.target), str(source), labels.index(label)) for node, (label, source) in zip(ops, sources, strict=True)
    ]


def test_recurrent_ops_are_decomposed_in_the_code() -> None:
    flow = flow_of(Recurrent(nn.GRU), x(2, 2, 8), "x86", decompose=("gru",))
    assert flow.verified.startswith("equal, with capture's rewriting (recurrent op, op source); without it: ")
    assert "import pt2qa" not in flow.code


@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_of_attention_is_decomposed_in_the_code(masked: bool) -> None:
    flow = flow_of(Masked(masked), x(2, 2, 5, 8), MATMUL, decompose=("attention",))
    assert flow.verified.startswith("equal, with capture's rewriting (attention); without it: "), flow.verified


def test_attention_is_decomposed_in_the_code() -> None:
    flow = flow_of(Attention(), x(2, 5, 8), MATMUL, Edit("float", ("fc/linear",)), decompose=("attention",))
    assert flow.verified.startswith("equal, with capture's rewriting (attention, op source); without it: "), (
        flow.verified
    )
    assert "quantizer=quantizer" in flow.code


def fused(path: str = "features.0") -> Edit:
    return Edit("fuse", (f"{path}.0/conv2d", f"{path}.2/hardtanh"))


BATCH = torch.export.Dim("batch", min=1, max=64)
X86 = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
MATMUL = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
MATMUL.set_function_type_qconfig(torch.matmul, get_default_x86_inductor_quantization_config())
PLAIN: dict[str, tuple[nn.Module, Any, Any, tuple[Edit, ...], dict[str, Any]]] = {
    "dots and digits": (Nested(), images(), "xnnpack", (fused(), Edit("float", ("features.1/conv2d",))), {}),
    "dots and digits, x86": (Nested(), images(), "x86", (Edit("float", ("blocks.0.0/conv2d",)),), {}),
    "per tensor": (Nested(), images(), "xnnpack:per_channel=false", (fused(),), {}),
    "observer": (Nested(), images(), "xnnpack", (Edit("observer", ("features.1/conv2d",), "minmax"),), {}),
    "strict": (Nested(), images(), "x86", (Edit("float", ("features.1/conv2d",)),), {"strict": True}),
    "dynamic shapes": (
        Nested(),
        images(),
        "xnnpack",
        (fused(),),
        {"dynamic_shapes": {"x": {0: BATCH}}, "batches": [x(3, 3, 8, 8), x(5, 3, 8, 8)]},
    ),
    "keywords": (
        Keywords(),
        x(4, 8),
        "xnnpack",
        (Edit("float", ("fc/linear",)),),
        {"kwargs": {"scale": x(8)}, "batches": [{"x": x(4, 8), "scale": x(8)}]},
    ),
    "dynamic mode": (Keywords(), {"x": x(4, 8), "scale": x(8)}, "xnnpack:mode=dynamic", (), {}),
    "dynamic mode, x86": (Keywords(), {"x": x(4, 8), "scale": x(8)}, "x86:mode=dynamic", (), {}),
    "weights only": (Keywords(), {"x": x(4, 8), "scale": x(8)}, "x86:mode=weight_only", (), {}),
    "dynamic edit": (Keywords(), {"x": x(4, 8), "scale": x(8)}, "x86", (Edit("dynamic", ("fc/linear",)),), {}),
    "a quantizer of one's own": (Nested(), images(), X86, (Edit("float", ("features.1/conv2d",)),), {}),
    "options, x86": (
        Nested(),
        images(),
        pt2qa.quantizer(
            "x86", modules={"features.0": {"reduce_range": True}}, op_types={"conv2d": {"reduce_range": True}}
        ),
        (Edit("float", ("features.1/conv2d",)),),
        {},
    ),
    "biases, added in order": (
        Nested(),
        images(),
        "xnnpack",
        tuple(Edit("bias", ("features.1/conv2d",), values=in_base64([value] * 4)) for value in (1e8, -1e8, 0.1)),
        {},
    ),
    "body of a loop": (Loop(), x(2, 4), "xnnpack", (Edit("observer", ("first/linear",), "minmax"),), {}),
    "training": (
        Keywords(),
        {"x": x(4, 8), "scale": x(8)},
        "xnnpack",
        (Edit("float", ("fc/linear",)),),
        {"qat": True},
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_the_plain_flow_gives_the_same_bits(case: str) -> None:
    model, example, quantizer, edits, options = PLAIN[case]
    flow = flow_of(model, example, quantizer, *edits, **options)
    assert flow.verified == "equal"
    assert "import pt2qa" not in flow.code
    assert "def rewrite" not in flow.code


WITH_PT2QA: dict[str, tuple[nn.Module, Any, Any, tuple[Edit, ...], dict[str, Any]]] = {
    "options of the plug-in": (
        Nested(),
        images(),
        pt2qa.quantizer("xnnpack", modules={"features.0": None}),
        (Edit("float", ("features.1/conv2d",)),),
        {},
    ),
}


@pytest.mark.parametrize("case", WITH_PT2QA)
def test_what_only_pt2qa_can_do_is_done_with_pt2qa(case: str) -> None:
    model, example, quantizer, edits, options = WITH_PT2QA[case]
    flow = flow_of(model, example, quantizer, *edits, **options)
    assert flow.verified.startswith("equal, with pt2qa; without it: "), flow.verified
    assert "import pt2qa" in flow.code


ALONE: dict[str, tuple[type[nn.Module], Any, Any, tuple[Edit, ...], dict[str, Any]]] = {
    "nested": (Nested, images(), "x86", (Edit("float", ("features.1/conv2d",)),), {}),
    "region": (NoGrad, x(4, 8), "x86", (Edit("float", ("a/linear",)),), {}),
    "twice": (Twice, images(), "x86", (), {}),
    "options": (Nested, images(), pt2qa.quantizer("x86", modules={"features.0": None}), (), {}),
    "recurrent": (Recurrent, x(1, 2, 8), "x86", (), {"decompose": ("lstm",)}),
}
SCRIPT = """
import importlib
import runpy
import sys
import torch
import nets

for case, saved in torch.load("cases.pt").items():
    model = getattr(nets, saved["model"])().eval()
    model.load_state_dict(saved["weights"])
    quantize = importlib.import_module(f"quantizer_{case}").quantize
    quantized = quantize(model, (saved["batch"],), [(saved["batch"],)])
    assert torch.equal(quantized(saved["batch"]), saved["expected"]), case
assert not [name for name in sys.modules if name.startswith("pt2qa")]
runpy.run_path("quantizer_nested.py", run_name="__main__")
"""


def test_the_code_runs_where_pt2qa_is_not_imported(tmp_path: Path) -> None:
    """A process of its own quantizes saved models, and the outputs are those of the pairs."""
    saved = {}
    for case, (net, batch, quantizer, edits, options) in ALONE.items():
        torch.manual_seed(0)
        model = net().eval()
        capture = pt2qa.capture(model, batch, **options)
        pair = pt2qa.quantize(capture, quantizer, [batch], overrides=OverridePlan(edits), progress=False)
        (tmp_path / f"quantizer_{case}.py").write_text(plain_flow(pair, progress=False).code)
        weights, expected = model.state_dict(), pair.quantized(batch)
        saved[case] = {"model": net.__name__, "weights": weights, "batch": batch, "expected": expected}
    torch.save(saved, tmp_path / "cases.pt")
    sources = [inspect.getsource(net) for net in dict.fromkeys(case[0] for case in ALONE.values())]
    imports = "import torch\nfrom torch import Tensor, nn\n"
    (tmp_path / "nets.py").write_text("\n\n".join([imports, *sources]))
    (tmp_path / "script.py").write_text(SCRIPT)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nested, quantized by x86.")


class Shuffled:
    """A loader that gives other batches each time."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.randn(2, 3, 8, 8)


class Once:
    """A loader that gives its batch once."""

    def __init__(self) -> None:
        self.batches = [images()]

    def __iter__(self) -> Iterator[Tensor]:
        while self.batches:
            yield self.batches.pop()


def test_what_cannot_be_compared_is_not_run_and_says_why() -> None:
    batch = images()
    capture = pt2qa.capture(Twice().eval(), batch)

    def told(calibration: Any, **options: Any) -> str:
        pair = pt2qa.quantize(capture, "x86", calibration, progress=False, **options)
        flow = plain_flow(pair, progress=False)
        assert not flow.equal
        assert "def rewrite" in flow.code  # all that capture rewrote, as nothing shows that it is not needed
        return flow.verified

    assert told(iter([batch])) == "not run: the calibration batches were an iterator, which is used up"
    assert told(Shuffled()).startswith("not run: the calibration batches change from one reading to the next")
    assert told(Once()).startswith("not run: the calibration batches cannot be read again: there are none")
    trained = told([batch], qat=True, train=lambda graph: None)
    assert trained == "not run: the pair was trained, which is not repeated"
    pair = pt2qa.quantize(capture, "x86", [batch], progress=False)
    assert plain_flow(pair, verify=False).verified == "not run: verification is switched off"
    with pytest.raises(SelectionError, match=r"was not made by pt2qa\.quantize"):
        plain_flow(replace(pair, recipe=None))


def test_a_model_that_was_changed_since_gives_a_difference_and_its_first_op() -> None:
    model = Nested().eval()
    pair = pt2qa.quantize(pt2qa.capture(copy.deepcopy(model), images()), "x86", [images()], progress=False)
    with torch.no_grad():
        model.features[1].weight.mul_(1.5)
    assert pair.capture is not None
    flow = plain_flow(replace(pair, capture=replace(pair.capture, eager=model)), progress=False)
    assert re.fullmatch(
        r"differs: outputs agree to -?\d+\.\d dB, first at features\.1/conv2d; "
        r"with capture's rewriting as code: outputs agree to .*; with pt2qa: .*",
        flow.verified,
    )


def test_names_cannot_break_out_of_the_docstring() -> None:
    pair = pt2qa.quantize(pt2qa.capture(Twice().eval(), images()), "x86", [images()], progress=False)
    flow = plain_flow(pair, about='"""\nraise ValueError\\', progress=False)
    assert flow.equal, flow.verified
