"""``pt2qa init``: writes a flow file for a model, as far as the model and the data show what it must hold.

And ``pt2qa new-plugin``: writes a package with a quantizer, a backend and tests, which pass as they are.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from pt2qa._printable import near_names
from pt2qa._report.atomic import write_atomic
from pt2qa.cli import options
from pt2qa.cli.flow import load_flow
from pt2qa.cli.group import main, say, write
from pt2qa.errors import FlowError

_ZOOS: Final = {
    "torchvision": ("torchvision.models.get_model({0!r}, weights={own})", "'DEFAULT'", "None"),
    "timm": ("timm.create_model({0!r}, pretrained={own})", "True", "False"),
    "transformers": (
        "Logits(transformers.AutoModelForSequenceClassification.{own})",
        "from_pretrained({0!r})",
        "from_config(transformers.AutoConfig.from_pretrained({0!r}))",
    ),
}
"""How packages make a model: with the weights that they have for it, or without any."""

_LOGITS: Final = '''

class Logits(torch.nn.Module):
    """The model with a tensor as its output."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, input_ids, attention_mask):
        return self.net(input_ids=input_ids, attention_mask=attention_mask).logits
'''
"""What makes a model of transformers one that :mod:`pt2qa` takes."""

_TRANSFORMS: Final = {
    "torchvision": "torchvision.models.get_model_weights({0!r}).DEFAULT.transforms()",
    "timm": "timm.data.create_transform(**timm.data.resolve_model_data_config(model()))",
}
"""How pictures become inputs of their models."""

_FIRST: Final = {
    "Conv2d": ("torch.randn(BATCH * 4, {0.in_channels}, {size}, {size})", (224, 32, 28, 64, 96, 128, 16, 8)),
    "Conv1d": ("torch.randn(BATCH * 4, {0.in_channels}, {size})", (16000, 1000, 128, 64)),
    "Linear": ("torch.randn(BATCH * 4, {0.in_features})", (1,)),
    "Embedding": ("torch.randint({0.num_embeddings}, (BATCH * 4, {size}))", (16, 64, 128)),
    "LSTM": ("torch.randn(BATCH * 4, {size}, {0.input_size})", (16,)),
    "GRU": ("torch.randn(BATCH * 4, {size}, {0.input_size})", (16,)),
}
"""Random inputs, by the first layer of a model, and the sizes to try."""

_LABELS: Final = ("label", "labels", "target", "targets", "y")
_WEIGHTS: Final = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


@main.command()
@click.argument("what", metavar="MODEL")
@click.option("--model", metavar="FILE.py:CLASS", help="For a file of weights: the class that has them.")
@click.option(
    "--data",
    metavar="SOURCE",
    help="FILE.npz, a folder of pictures with a folder for each class, or FILE.py:NAME, a dataset, a DataLoader, or a "
    "function that returns one.  [default: random numbers]",
)
@click.option("--input", "size", metavar="3x224x224", help="Size of a random input.  [default: what the model takes]")
@options.output("-o", "file", default="flow.py", show_default=True, help="The flow file.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(what: str, model: str | None, data: str | None, size: str | None, file: Path, force: bool) -> None:
    """Write a flow file, which the other commands take: a model, its data in two parts, and its accuracy.

    MODEL is a Python file with the model's class, FILE.py:CLASS, package.module:CLASS, a file of weights, or a model of
    an installed package: torchvision:NAME, timm:NAME or transformers:NAME. What neither the model nor the data show is
    asked for; without a terminal, the error names the option to give. The file is run once.

    \b
      pt2qa init net.py --data digits.npz
      pt2qa init net.pt --model net.py:Net --data net.py:test_set
      pt2qa init torchvision:mobilenet_v2 --data pictures
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    import torch

    if file.exists() and not force:
        raise FlowError(f"{file} exists: give --force to replace it, or another name with -o")
    weights = what if what.endswith(_WEIGHTS) else None
    if weights is not None:
        what = model or _asked("--model", f"which class the weights in {weights} are for, as FILE.py:CLASS")
    elif model is not None:
        raise click.UsageError("--model goes with a file of weights")
    draft = _Draft(file)
    draft.model(what, weights)
    draft.data(data, size)
    write(file, functools.partial(write_atomic, content=draft.text()))
    flow = load_flow(str(file))
    try:
        with torch.no_grad():
            flow.model(*flow.args, **flow.kwargs)
    except Exception as error:
        raise FlowError(f"{file} is written, but its model fails on its data: {error}") from error
    if flow.metric is not None:
        click.echo(f"Accuracy of the float model: {flow.metric(flow.model):.2f} %")
    if draft.parts["drawn"]:
        say(f"{what} has the weights that it starts with; for trained ones: pt2qa init WEIGHTS.pt --model {what}")
    if data is None:
        say(f"{file} has random numbers as data, so its figures mean little: put yours into samples(), or give --data")


def _asked(option: str, what: str) -> str:
    """What neither the command line nor the model says; where nobody can answer, an error that names the option."""
    if sys.stdin is not None and sys.stdin.isatty():
        return str(click.prompt(f"{what[0].upper()}{what[1:]}"))
    raise FlowError(f"cannot see {what}: give {option}")


def rendered(template: str, **parts: Any) -> str:
    """A file of text, from its template."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # No page of HTML: the text is Python.
    environment = Environment(
        loader=PackageLoader("pt2qa", "cli"), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template(template).render(parts)


class _Draft:
    """The parts of a flow file, as text, and what they give when they are run."""

    def __init__(self, file: Path) -> None:
        self.home = file.resolve().parent
        self.folders: list[str] = []
        self.imports = {"import torch", "from torch.utils.data import DataLoader, Subset"}
        self.parts: dict[str, Any] = {}
        self.zoo = ("", "")
        self.net: Any = None

    def text(self) -> str:
        imports = sorted(self.imports, key=lambda line: (line.startswith("from"), line))
        return rendered("flow.py.jinja", folders=self.folders, imports=imports, **self.parts)

    def value(self, *lines: str) -> Any:
        """What the last of some lines gives after the imports."""
        space: dict[str, Any] = {"BATCH": 1, "model": lambda: self.net, "net": self.net}
        try:
            exec("\n".join([*self.imports, self.parts.get("wrapper", ""), *lines[:-1]]), space)
            return eval(lines[-1], space)
        except Exception as error:
            raise FlowError(f"{lines[-1]} fails: {type(error).__name__}: {error}") from error

    def model(self, what: str, weights: str | None) -> None:
        """The model that ``what`` names, with its own weights or those of a file."""
        zoo, _, name = what.partition(":")
        self.parts["wrapper"] = _LOGITS if zoo == "transformers" else ""
        if zoo in _ZOOS:
            self.zoo = (zoo, name)
            template, *own = _ZOOS[zoo]
            self.imports.add(f"import {zoo}")
            made = template.format(name, own=own[weights is not None].format(name))
        else:
            made = self.named(what, "the model")
        self.net = self.value(made)
        drawn = weights is None and not self.zoo[0] and made.endswith("()")
        self.parts |= {"model": made, "weights": weights and self._weights(weights), "drawn": drawn}
        if weights is not None:
            self.value(f"net.load_state_dict({self.parts['weights']})")
        self.net.eval()

    def _weights(self, file: str) -> str:
        """The expression for the weights in a file, which may hold them under a name."""
        if file.endswith(".safetensors"):
            self.imports.add("from safetensors.torch import load_file")
            made = f"load_file({file!r})"
        else:
            made = f"torch.load({file!r}, map_location='cpu', weights_only=True)"
        try:
            found = self.value(made)
        except FlowError as error:
            if not isinstance(error.__cause__, pickle.UnpicklingError):
                raise
            raise FlowError(
                f"{file} holds more than weights, and reading that could run code: give the file that "
                "torch.save(model.state_dict(), FILE) writes"
            ) from error
        nested = [key for key, value in found.items() if isinstance(value, Mapping)]
        first = next((key for key in nested if "state" in key or key == "model"), None)
        if first is not None:
            made, found = f"{made}[{first!r}]", found[first]
        prefix = next(iter(found), "").partition(".")[0] + "."  # of DataParallel, torch.compile, Lightning
        if found.keys().isdisjoint(self.net.state_dict()) and all(name.startswith(prefix) for name in found):
            made = f"{{name.removeprefix({prefix!r}): value for name, value in {made}.items()}}"
        return made

    def named(self, what: str, wanted: str) -> str:
        """The expression for FILE.py:NAME or package.module:NAME, which is called if it is a class or a function."""
        source, _, name = what.partition(":")
        folder = Path(source).resolve().parent if source.endswith(".py") else Path.cwd()
        if source.endswith(".py") and not Path(source).is_file():
            raise FlowError(f"{source}: no such file")
        module = Path(source).stem if source.endswith(".py") else source
        if folder != self.home and str(folder) not in self.folders:
            self.folders.append(str(folder))
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        try:
            found = self.value(f"import {module}", module)
        except FlowError as error:
            missing = getattr(error.__cause__, "name", None)
            if missing is None or not f"{module}.".startswith(f"{missing}."):
                raise  # it is what the module imports that is missing, or fails
            raise FlowError(
                f"{source} is no Python module, and no file or folder that pt2qa init takes for {wanted}"
            ) from error
        name = name or _model_in(found, source)
        if not hasattr(found, name):
            raise FlowError(f"{source} has no {name!r} for {wanted}; it has {near_names(name, _public(found))}")
        self.imports.add(f"from {module} import {name}")
        value = getattr(found, name)
        if not (isinstance(value, type) or hasattr(value, "__code__")):
            return name
        try:
            inspect.signature(value).bind()
        except TypeError as error:
            ours = f"name a function of yours that takes none and returns {wanted}"
            raise FlowError(f"{source}:{name} needs arguments ({error}): {ours}") from error
        return f"{name}()"

    def data(self, source: str | None, size: str | None) -> None:
        """The samples from a source, or random ones, and what is what in them."""
        if source is None:
            lines = self._random(size)
        elif source.endswith(".npz"):
            lines = self._arrays(source)
        elif Path(source).is_dir():
            lines = self._pictures(source, size)
        else:
            made = self.named(source, "the data")
            found = self.value(made)
            tensors = ".with_format('torch')" if hasattr(found, "with_format") else ""  # of Hugging Face
            lines = [f"{made}.dataset" if hasattr(found, "dataset") else made + tensors]
        samples = self.value(*lines)
        self.parts |= {
            "lines": lines[:-1],
            "samples": lines[-1],
            "random": source is None,
            **_parts_of(samples[0], self.net),
        }
        classes = getattr(samples, "classes", ())  # of a folder of pictures
        self.parts["classes"] = classes
        if classes:
            scores = self.net(samples[0][0][None]).shape[-1]
            if scores != len(classes):
                self.parts["classes"] = ()
                say(f"{source} has {len(classes)} classes and the model {scores}, so no accuracy is measured")
                self.parts["label"] = ""

    def _random(self, size: str | None) -> list[str]:
        import torch

        self.imports.add("from torch.utils.data import TensorDataset")
        if self.zoo[0] == "transformers":
            ids = f"torch.randint({self.net.net.config.vocab_size}, (BATCH * 4, 64))"
            return [f"ids = {ids}", "[{'input_ids': each, 'attention_mask': torch.ones_like(each)} for each in ids]"]
        if size is not None:
            return [f"TensorDataset(torch.randn(BATCH * 4, {', '.join(re.findall('[0-9]+', size))}))"]
        first = next((part for part in self.net.modules() if type(part).__name__ in _FIRST), None)
        template, sizes = _FIRST.get(type(first).__name__, ("", ()))
        for made in (template.format(first, size=each) for each in sizes):
            try:
                with torch.no_grad():
                    self.net(self.value(made)[:2])
            except Exception:  # the model does not take this size
                continue
            return [f"TensorDataset({made})"]
        return self._random(_asked("--input", f"the size of one input of {type(self.net).__name__}, as 3x224x224"))

    def _arrays(self, file: str) -> list[str]:
        import numpy as np

        self.imports |= {"import numpy as np", "from torch.utils.data import TensorDataset"}
        if not Path(file).is_file():
            raise FlowError(f"{file}: no such file")
        arrays = np.load(file)
        names = sorted(arrays.files, key=lambda name: name.lower() in _LABELS)
        parts = {name: f"torch.from_numpy(arrays[{name!r}])" for name in names}
        each = ", ".join(made + ".float()" * (arrays[name].dtype == "float64") for name, made in parts.items())
        return [f"arrays = np.load({file!r})", f"TensorDataset({each})"]

    def _pictures(self, folder: str, size: str | None) -> list[str]:
        self.imports.add("import torchvision")
        transform = _TRANSFORMS.get(self.zoo[0], "").format(self.zoo[1])
        if not transform:
            size = size or _asked("--input", "the size of the pictures that the model takes, as 3x224x224")
            height, width = re.findall("[0-9]+", size)[-2:]
            steps = f"torchvision.transforms.Resize(({height}, {width})), torchvision.transforms.ToTensor()"
            transform = f"torchvision.transforms.Compose([{steps}])"
        return [f"torchvision.datasets.ImageFolder({folder!r}, {transform})"]


def _public(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)]


def _model_in(module: Any, source: str) -> str:
    """The model in a file, if it has one: an object, or a class that is no part of another."""
    import torch

    found: dict[str, Any] = {}
    for name in _public(module):
        value = getattr(module, name)
        own = isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == module.__name__
        try:
            made = value() if own else value
        except TypeError:
            continue  # a class that takes arguments
        if isinstance(made, torch.nn.Module):
            found[name] = made
    parts = {type(part) for made in found.values() for part in list(made.modules())[1:]}
    whole = [name for name, made in found.items() if type(made) not in parts]
    if len(whole) == 1:
        return whole[0]
    has = f"it has {', '.join(whole)}" if whole else "it has no class that takes no arguments; a function can make it"
    return _asked(f"{source}:NAME", f"which name in {source} is the model ({has})").rpartition(":")[2]


def _parts_of(item: Any, net: Any) -> dict[str, Any]:
    """Where the inputs and the label are in an item.

    Entries that forward has no arguments for are left out; where it has none for any of them, they go by position.
    """
    import torch

    if isinstance(item, Mapping):
        labels = [str(name) for name in item if str(name).lower() in _LABELS]
        given = [str(name) for name in item if name not in labels]
        taken = inspect.signature(net.forward).parameters
        rest = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        known = [name for name in given if rest or name in taken]
        label = labels and f"item[{labels[0]!r}]"
        if known:
            inputs = ", ".join(f"{name!r}: item[{name!r}]" for name in known)
            return {"inputs": f"{{{inputs}}}", "named": True, "label": label}
        needed = sum(each.default is each.empty for each in taken.values())
        inputs = ", ".join(f"item[{name!r}]" for name in given[:needed])
        return {"inputs": inputs if needed == 1 else f"({inputs})", "named": False, "label": label}
    if not isinstance(item, tuple | list):
        return {"inputs": "item", "named": False, "label": ""}
    label = item[-1]
    whole = isinstance(label, int) or (
        getattr(label, "ndim", 1) == 0 and not torch.as_tensor(label).is_floating_point()
    )
    count = len(item) - whole
    inputs = "item[0]" if count == 1 else f"tuple(item[:{count}])"
    return {"inputs": inputs, "named": False, "label": "item[-1]" if whole else ""}


FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "{package}/__init__.py": "plugin.py",
    "{package}/quantizer.py": "quantizer.py",
    "{package}/kernels.py": "kernels.py",
    "tests/test_{name}.py": "test.py",
}
"""The files of a package, and the template of each."""


@main.command("new-plugin")
@click.argument("name")
@click.option(
    *("-o", "folder"), metavar="DIR", type=click.Path(path_type=Path), help="Folder to write to.  [default: NAME]"
)
def new_plugin(name: str, folder: Path | None) -> None:
    """Write a package for a backend of your own: a quantizer, what runs its graphs, and tests, which pass as they are.

    NAME is what -q and -b then take. Put your kernels into kernels.py, and what they take into the spec.

    \b
      pt2qa new-plugin mynpu
      pip install -e mynpu
      pytest mynpu
      pt2qa deploy flow.py -q mynpu -o deploy
    """  # noqa: D301 - click needs the backspace itself, which keeps its lines as they are
    from pt2qa.plugins import available, backends

    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise click.BadParameter(f"got {name!r}, expected a name of small letters, digits and _, such as mynpu")
    if taken := sorted({*available(), *backends()} & {name}):
        raise click.BadParameter(f"{taken[0]!r} is installed already: choose another name")
    home = Path(name) if folder is None else folder
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise click.BadParameter(f"{home} exists and is not empty: give another folder with -o")
    parts = {"name": name, "package": f"pt2qa_{name}", "title": name.title().replace("_", "")}
    for file, template in FILES.items():
        path = home / file.format(**parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, functools.partial(write_atomic, content=rendered(f"new_plugin/{template}.jinja", **parts)))
