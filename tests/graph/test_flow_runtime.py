"""What printed code is made of stands for itself, and calls ops as pt2qa does."""

from __future__ import annotations

import ast
import base64
import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pt2qa
from pt2qa._graph.handles import names_of
from pt2qa._graph.internals import flow_passes, flow_quantizer, flow_runtime, nodes
from pt2qa._graph.internals.flow_runtime import change_parameters, ops_by_name
from pt2qa.plugins.code import needed, needed_imports
from tests.overrides.flows import captured
from tests.overrides.nets import NETS

MODULES = (nodes, flow_runtime, flow_passes, flow_quantizer)
TREES = [ast.parse(inspect.getsource(module)) for module in MODULES]
DEFINED = [part.name for tree in TREES for part in tree.body if isinstance(part, ast.FunctionDef | ast.ClassDef)]


def test_it_imports_nothing_of_pt2qa_but_itself() -> None:
    imports = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}
    assert {name for name in found if name.startswith("pt2qa")} <= {module.__name__ for module in MODULES}


def test_all_of_it_is_one_text_in_which_each_name_is_defined_once() -> None:
    assert len(DEFINED) == len(set(DEFINED))
    body = needed("", DEFINED)
    names: dict[str, Any] = {}
    exec(compile("\n".join([*needed_imports([], body), *body]), "code", "exec", dont_inherit=True), names)
    # Annotations may be text, and the module of a name that is not imported.
    exec("\n".join([*needed_imports([], body), *body]), {"__name__": "nowhere"})
    assert names.keys() >= set(DEFINED)


def test_capture_does_not_import_quantizers() -> None:
    script = "import pt2qa, sys; pt2qa.capture; assert not [name for name in sys.modules if name.startswith('torchao')]"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("net", NETS)
def test_ops_have_the_names_of_reports(net: str) -> None:
    graph = captured(net)[0].module()
    assert {*ops_by_name(graph.graph)} == {"output", *(name.name for name in names_of(graph).values())}


@pytest.mark.parametrize("kind", ["scale", "shift"])
def test_what_moves_from_a_norm_to_its_readers_leaves_the_outputs(kind: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), torch.randn(5, 4)
    graph = pt2qa.capture(model.eval(), x).module()
    expected, norm = graph(x), {name: value.clone() for name, value in graph.named_parameters()}
    values = np.array([2.0, 0.5, 3.0, 1.0], dtype="<f4")
    numbers = base64.b64encode(values.tobytes()).decode()
    own = [(2, 0, -1.0), (3, 0, -1.0)] if kind == "scale" else [(3, 0, -1.0)]
    changes = [(kind, "0/layer_norm", *each, numbers) for each in own]
    changes.append((kind, "1/linear", 1 if kind == "scale" else 2, 1, 1.0, numbers))
    change_parameters(graph, ops_by_name(graph.graph), changes)
    torch.testing.assert_close(graph(x), expected)
    weight, bias = (graph.get_parameter(f"0.{name}").detach().numpy() for name in ("weight", "bias"))
    own_weight, own_bias = (norm[f"0.{name}"].detach().numpy() for name in ("weight", "bias"))
    moved = (own_weight / values, own_bias / values) if kind == "scale" else (own_weight, own_bias - values)
    np.testing.assert_allclose((weight, bias), moved)
