"""What users hand over as a batch: taken where torch would take it, else one line that says what to pass."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from tests.flows import quantized_pair
from tests.models import KeywordInputs, Linears


def x() -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def inference() -> Tensor:
    with torch.inference_mode():
        return x()


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Linears(), x())


ENTRIES: dict[str, Callable[[pt2qa.QuantizedPair, Any], Any]] = {
    "quantize": lambda pair, batch: pt2qa.quantize(pair.capture, "xnnpack", [batch], progress=False),  # type: ignore[arg-type]
    "layers": lambda pair, batch: pt2qa.compare_layers(pair, [batch], progress=False),
    "bad cases": lambda pair, batch: pt2qa.find_bad_cases(pair, [batch], progress=False),
    "exact": lambda pair, batch: pt2qa.sensitivity(pair, [batch], method="exact", progress=False),
    "projection": lambda pair, batch: pt2qa.sensitivity(pair, [batch], method="projection", progress=False),
    "profile": lambda pair, batch: pt2qa.profile(pair.quantized, [batch], progress=False),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "requires grad": lambda: x().requires_grad_(),
    "made with grad": lambda: x().requires_grad_() * 1,
    "parameter": lambda: nn.Parameter(x()),
    "inference mode": inference,
    "mapping": lambda: UserDict(x=x()),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (lambda: x().numpy(), r"is a NumPy array of shape \[4, 16\] and dtype float32; .* Pass torch.from_numpy"),
    "sparse": (lambda: x().to_sparse(), r"has the layout sparse_coo; expected a dense tensor.* Pass its to_dense\(\)"),
    "csr": (lambda: x().to_sparse_csr(), r"has the layout sparse_csr; expected a dense tensor"),
    "device": (lambda: x().to("meta"), "is on meta; .*captured on cpu"),
    "wrong key": (
        lambda: {"y": x()},
        r"a dict with the keys \['y'\], without \['x'\]; the model takes the inputs \['x'\]",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("entry", ENTRIES)
def test_batches_that_torch_takes_are_taken_and_others_refused_in_one_line(
    pair: pt2qa.QuantizedPair, entry: str
) -> None:
    for make in TAKEN.values():
        given = make()
        ENTRIES[entry](pair, given)
    for make, message in REFUSED.values():
        with pytest.raises(pt2qa.BatchError, match=message) as error:
            ENTRIES[entry](pair, make())
        assert "\n" not in str(error.value)


def test_a_batch_that_requires_grad_gives_the_same_numbers(pair: pt2qa.QuantizedPair) -> None:
    plain = pt2qa.compare_layers(pair, [x()], progress=False)
    assert pt2qa.compare_layers(pair, [nn.Parameter(x())], progress=False).rows == plain.rows


def test_capture_takes_and_refuses_alike() -> None:
    for name, make in TAKEN.items():
        if name != "mapping":
            capture = pt2qa.capture(Linears().eval(), make())
            assert not capture.args[0].requires_grad
            assert type(capture.args[0]) is Tensor
    for name in ("numpy", "sparse"):
        make, message = REFUSED[name]
        for args in (make(), (make(),)):
            with pytest.raises(pt2qa.CaptureError, match=message):
                pt2qa.capture(Linears().eval(), args)


def test_a_dict_that_lacks_a_positional_input_says_which() -> None:
    batch = {"x": x(), "scale": torch.ones(16)}
    capture = pt2qa.capture(KeywordInputs().eval(), (x(),), {"scale": torch.ones(16)})
    made = pt2qa.quantize(capture, "xnnpack", [batch], progress=False)
    with pytest.raises(
        pt2qa.BatchError, match=r"keys \['scale'\], without \['x'\]; the model takes .* \['x', 'scale'\]"
    ):
        pt2qa.compare_layers(made, [{"scale": torch.ones(16)}], progress=False)
    with pytest.raises(pt2qa.BatchError, match=r"the batch has unknown keywords \['y', 3\]; captured with"):
        pt2qa.compare_layers(made, [{**batch, "y": x(), 3: x()}], progress=False)


def test_an_array_is_no_iterable_of_batches(pair: pt2qa.QuantizedPair) -> None:
    with pytest.raises(pt2qa.BatchError, match=r"batches is a single ndarray; expected an iterable of batches"):
        pt2qa.compare_layers(pair, x().numpy(), progress=False)
