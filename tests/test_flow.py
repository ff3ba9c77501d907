"""A flow file gives the command line its model and data, or one error that says what to change."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from pt2qa.cli.flow import Inputs, load_flow, part_of
from pt2qa.errors import BatchError, FlowError

HEAD = "import torch\nmodel = torch.nn.Linear(2, 3).eval()\nx = torch.zeros(4, 2)\n"
HEAD += "given = dict(model=model, example_inputs=x, batches=[x])\n"


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def flow(tmp_path):
    """Load a flow whose function has this body, after an import of torch, a model and an input ``x``."""

    def load(body, name="flow"):
        file = tmp_path / "demo.py"
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        file.write_text(f"{HEAD}def flow():\n{lines}\n", encoding="utf-8")
        return load_flow(f"{file}:{name}")

    return load


def test_three_things_make_a_flow(flow):
    loaded = flow("return model, x, [x, x]")
    assert isinstance(loaded.model, torch.nn.Linear)
    assert (len(loaded.args), loaded.kwargs, loaded.dynamic_shapes) == (1, {}, None)
    assert loaded.args[0].shape == (4, 2)
    assert len(list(loaded.batches)) == len(list(loaded.batches)) == 2


def test_example_inputs_are_a_tensor_a_tuple_or_a_dict(flow):
    assert len(flow("return model, (x, x), [x]").args) == 2
    loaded = flow("return model, {'input': x}, [{'input': x}]")
    assert (loaded.args, list(loaded.kwargs)) == ((), ["input"])


def test_a_dict_may_hold_a_mask(flow):
    given = "dict(model=model, example_inputs=x, batches=[x], "
    assert flow(f"return {given} mask='attention_mask')").mask == "attention_mask"
    assert flow(f"return {given} mask=lambda batch: batch > 0)").mask(torch.ones(1)).all()
    assert flow("return model, x, [x]").mask is None


def test_labels_of_the_items_reach_the_bad_cases(flow):
    """By the loader's own items, so that one that shuffles keeps samples and labels together."""
    body = (
        "data = [(torch.tensor([float(n), -n]), n % 3) for n in range(12)]\n"
        "loader = torch.utils.data.DataLoader(data, 4, shuffle=True)\n"
        "return dict(model=model, example_inputs=x, batches=[x], evaluation=loader, targets_of=lambda item: item[1], "
        "classes=['ant', 'bee', 'cat'])"
    )
    loaded = flow(body)
    pair = loaded.quantized("xnnpack")
    for given, samples in ((loaded, 12), (part_of(loaded, 1, 3), 4)):
        cases = given.bad_cases(pair, 12)
        rows = [row for row in cases.rows if row.metric == "sqnr"]
        assert len(rows) == samples == cases.labels[0].targets
        for row in rows:
            sample = cases.batch(row)[0][0, 0]
            assert row.target == ["ant", "bee", "cat"][int(sample) % 3]
    single = flow(
        "return dict(model=model, example_inputs=x[:1], batches=[(x[0], 2)], targets_of=lambda item: item[1])"
    )
    assert single.bad_cases(single.quantized("xnnpack"), 1).rows[0].target == "2"
    with pytest.raises(FlowError, match="targets_of: the first item fails: IndexError: tuple index out of range"):
        flow("return dict(model=model, example_inputs=x, batches=[(x, 0)], targets_of=lambda item: item[2])")


def test_a_dict_may_hold_dynamic_shapes(flow):
    loaded = flow(
        "n = torch.export.Dim('n')\n"
        "return dict(model=model, example_inputs=x, batches=[x], dynamic_shapes={'input': {0: n}})"
    )
    assert list(loaded.dynamic_shapes) == ["input"]


@pytest.mark.parametrize(
    "body",
    [
        "return model, x, [(x, 1), (x, 2)], lambda item: item[0]",
        "return dict(model=model, example_inputs=x, batches=[(x, 1), (x, 2)], inputs_of=lambda item: item[0])",
    ],
    ids=["fourth", "dict"],
)
def test_inputs_of_takes_the_inputs_out_of_each_item_each_time_anew(flow, body):
    batches = flow(body).batches
    for _ in range(2):
        assert [batch.shape for batch in batches] == [(4, 2), (4, 2)]
    assert len(batches) == 2


def test_evaluation_batches_go_through_inputs_of_too(flow):
    loaded = flow("return given | dict(evaluation=[(x, 1), (x, 2)], inputs_of=lambda item: item[0])")
    assert [batch.shape for batch in loaded.evaluation] == [(4, 2), (4, 2)]


ROWS = "rows = [dict(input=[i, 1], label=i) for i in range(3)]\n"


@pytest.mark.parametrize(
    ("body", "shapes", "said"),
    [
        ("data = torch.utils.data.TensorDataset(x, x[:, 0])\nreturn model, x, torch.utils.data.DataLoader(data, 3)",
         [(3, 2), (1, 2)], "items hold more than the example inputs; left out: the last value"),
        ("return model, x, torch.utils.data.TensorDataset(x[:2])", [(1, 2), (1, 2)], "an item is one sample, and runs"),
        (f"{ROWS}return model, dict(input=x), rows", [(1, 2)] * 3, "left out: label"),
        (f"{ROWS}return model, dict(input=x), [(row, 1) for row in rows]", [(1, 2)] * 3, "left out: label"),
        ("return model, x, [x.double().numpy()]", [(4, 2)], ""),
        ("return model, x, torch.utils.data.DataLoader(x.double().numpy(), 4)", [(4, 2)], ""),
        ("return model, (x,), [[x.int().numpy(), x, x]]", [(4, 2)], "left out: the last 2 values"),
    ],
)  # fmt: skip
def test_items_are_given_the_form_of_the_example_inputs(flow, capsys, body, shapes, said):
    batches = [batch["input"] if isinstance(batch, dict) else batch for batch in flow(body).batches]
    batches = [batch[0] if isinstance(batch, tuple) else batch for batch in batches]
    assert [tuple(batch.shape) for batch in batches] == shapes
    assert torch.float64 not in {batch.dtype for batch in batches}
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == bool(err)


def test_pictures_of_bytes_do_not_become_floats_unscaled(flow):
    (batch,) = flow("import numpy as np\nreturn model, x, [np.full((4, 2), 255, np.uint8)]").batches
    assert batch.dtype == torch.uint8


def test_sizes_that_vary_are_dynamic(flow, capsys):
    loaded = flow("torch.manual_seed(0)\nreturn given | dict(example_inputs=x[:1], evaluation=[x[:3]])").fitted()
    assert "batches differ in size (args[0] has 1, 3, 4 in dimension 0): captured with" in capsys.readouterr().err
    assert loaded.args[0].shape == (4, 2)  # torch.export makes a size of 1 a constant
    loaded.capture().check_batch((torch.zeros(2, 2),))
    named = flow("return model, dict(input=x), [dict(input=x), dict(input=x[:2])]").fitted()
    assert list(named.dynamic_shapes) == ["input"]
    assert flow("return given").fitted().dynamic_shapes is None
    assert flow("return given | dict(evaluation=[x[:3]], dynamic_shapes=())").fitted().dynamic_shapes == ()


def test_batches_of_another_dtype_are_no_other_size(flow):
    loaded = flow("return model, x, [x.to(torch.uint8), x[:2].to(torch.uint8)]").fitted()
    assert loaded.sizes is None
    with pytest.raises(BatchError, match=r"has dtype torch\.uint8; captured with torch\.float32"):
        loaded.quantized("xnnpack")


def test_reading_sizes_draws_no_random_numbers(flow):
    loaded = flow("return model, x, torch.utils.data.DataLoader(x, batch_size=3, shuffle=True)")
    before = torch.get_rng_state()
    assert loaded.fitted().sizes is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_fixes_its_batch_size_is_named(flow):
    loaded = flow(
        "class Fixed(torch.nn.Module):\n    def forward(self, x): return x.reshape(4, 2) + torch.ones(4, 2)\n"
        "return Fixed().eval(), x, [x, x[:3]]"
    )
    with pytest.raises(FlowError, match=r"has 3, 4 in dimension 0.*, and the model computes with one size as a const"):
        loaded.fitted().capture()


@pytest.mark.parametrize(
    ("evaluation", "same"),
    [
        ("None", True),
        ("[x]", False),
        ("given['batches']", True),
        ("loader(data, batch_size=2)", True),
        ("loader(data_2)", False),
    ],
)
def test_two_loaders_may_read_the_same_data(flow, evaluation, same):
    head = "loader, data, data_2 = torch.utils.data.DataLoader, list(x), list(x)\n"
    given = "" if "given" in evaluation else ", batches=loader(data, shuffle=True)"
    assert flow(f"{head}return given | dict(evaluation={evaluation}{given})").same_data == same


def test_one_list_of_arrays_is_one_data_set(flow):
    assert flow("return given | dict(batches=(rows := [x.numpy()]), evaluation=rows)").same_data


def test_a_metric_may_go_with_a_target_object(flow):
    head = "import pt2qa\nfraction = pt2qa.Target(0.99, of_float=True)\n"
    target = flow(f"{head}return given | dict(metric=len, target=fraction)").target_of(None)
    assert (target.at_least, target.metric.__wrapped__, target.name, target.of_float) == (0.99, len, "len", True)
    assert flow("return given | dict(metric=len)").target_of(None) is None


def test_inputs_of_a_loader_without_a_length_has_none():
    class Endless:
        def __iter__(self):
            return iter([1, 2])

    inputs = Inputs(Endless(), lambda item: -item)
    assert list(inputs) == [-1, -2]
    with pytest.raises(TypeError):
        len(inputs)


@pytest.mark.parametrize(
    "batches",
    ["torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)", "(x, x)", "Again()", "Stream()"],
)
def test_loaders_that_start_over_are_taken(flow, batches):
    loaded = flow(
        "class Again:\n    def __iter__(self): return iter([x, x])\n"
        "class Items(torch.utils.data.IterableDataset):\n    def __iter__(self): return iter([x, x])\n"
        "def Stream(): return torch.utils.data.DataLoader(Items(), batch_size=None)\n"
        f"return model, x, {batches}"
    )
    assert len(list(loaded.batches)) == len(list(loaded.batches)) == 2


@pytest.mark.parametrize(
    ("batches", "kind"),
    [("(x for _ in range(3))", "generator"), ("iter([x])", "list_iterator"), ("zip([x], [x])", "zip")],
)
def test_an_iterator_that_ends_is_refused(flow, batches, kind):
    with pytest.raises(FlowError) as caught:
        flow(f"return model, x, {batches}")
    assert f"batches: got {kind}, which can be read only once, but calibration and each analysis need" in str(
        caught.value
    )
    assert "return a list, or a loader that starts over such as a DataLoader" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{}['label']", r"demo\.py:flow: metric failed: KeyError: 'label' \(demo\.py, line 6\)"),
        ("'good'", "demo.py:flow: metric returned 'good', expected a number; larger is better"),
        ("x", r"metric returned tensor\(.*, expected a number; larger is better"),
        ("None", "metric returned None, expected a number"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(flow, value, message):
    metric = flow(f"return given | dict(metric=lambda model: {value})").metric
    with pytest.raises(FlowError, match=f"(?s){message}"):
        metric(None)


def test_a_metric_may_give_a_tensor_with_a_gradient(flow):
    value = flow("return given | dict(metric=lambda model: model.weight.sum())")
    assert value.metric(value.model) == pytest.approx(float(value.model.weight.detach().sum()))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return model, x", r"demo\.py:flow returned a tuple of 2; expected \(model, example_inputs, batches\), or"),
        ("return None", r"demo\.py:flow returned None; expected \(model,"),
        ("return [model, x, [x]]", r"demo\.py:flow returned list; expected \(model,"),
        ("return {'model': model, 'batches': [x]}", "returned a dict without 'example_inputs'; expected model, "),
        ("return {'modle': model}", "returned a dict with 'modle'; did you mean 'model'"),
        ("return torch.nn.Linear, x, [x]", r"model: got type, expected a torch\.nn\.Module"),
        ("return model, [x], [x]", "example_inputs: got list, expected a tensor, a tuple of positional inputs"),
        ("return model, {1: x}, [x]", "example_inputs: got dict, expected"),
        ("return model, x, x", "batches: got one Tensor, expected several batches; put it in a list"),
        ("return model, x, x.numpy()", "batches: got one ndarray, expected several batches; put it in a list"),
        ("return model, x, [(x, 1)], lambda item: item[2]", r"batches: the first item fails: IndexError: tuple index"),
        ("return model, x, {'input': x}", "batches: got one dict, expected several batches; put it in a list"),
        ("return model, x, []", "batches: got an empty list, expected at least one batch"),
        ("return model, x, 3", "batches: got int, expected a list or a DataLoader of batches$"),
        ("return model, x, lambda: [x]", "batches: got function, expected a list or a DataLoader of batches; call it"),
        ("return given | dict(evaluation=x)", "evaluation: got one Tensor, expected several batches; put it in a list"),
        ("return given | dict(evaluation=iter([x]))", "evaluation: got list_iterator, which can be read only once"),
        ("return given | dict(mask=[1, 0])", "mask: got list, expected the name of an input or a function from a"),
        ("return given | dict(metric=0.9)", "metric: got float, expected a function from a model to a number"),
        ("return given | dict(target='top1>=0.7')", "flow: target: got 'top1>=0.7', expected decibels such as 30, "),
        ("return given | dict(target=[30])", r"flow: target: got \[30\], expected decibels such as 30, "),
        ("return model, x, [x], 0", "inputs_of: got int, expected a function from a loader's item to a batch"),
        ("\nraise ValueError('no data')", r"flow failed: ValueError: no data \(demo\.py, line 7\)"),
        ("import sys\nsys.exit(3)", r"flow failed: SystemExit: 3 \(demo\.py, line 7\)"),
        ("return (", r"demo\.py cannot be loaded: SyntaxError: .*\(demo\.py, line 6\)"),
    ],
)  # fmt: skip
def test_what_a_flow_may_not_return(flow, body, message):
    with pytest.raises(FlowError, match=message):
        flow(body)


def test_a_flow_that_cannot_be_imported_names_the_line(tmp_path):
    file = tmp_path / "broken_flow.py"
    file.write_text("x = 1\nimport no_such_module_at_all\n", encoding="utf-8")
    with pytest.raises(FlowError, match=r"cannot be loaded: ModuleNotFoundError: .*no_such_module.*py, line 2\)"):
        load_flow(f"{file}:flow")
    assert "pt2qa_flow_broken_flow" not in sys.modules


def test_an_edit_of_the_same_length_within_a_second_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "edited_flow.py"
    for width in (3, 5):
        text = HEAD.replace("Linear(2, 3)", f"Linear(2, {width})")
        file.write_text(f"{text}def flow():\n    return given\n", encoding="utf-8")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert load_flow(f"{file}:flow").model.out_features == width


def test_a_file_alone_stands_for_its_function_flow(tmp_path):
    file = tmp_path / "demo.py"
    file.write_text(f"{HEAD}def flow():\n    return given\n", encoding="utf-8")
    assert len(load_flow(str(file)).batches) == 1
    with pytest.raises(FlowError, match=r"C:\\flow\.py: no such file; expected a Python file with a function 'flow'"):
        load_flow("C:\\flow.py")


@pytest.mark.parametrize("where", ["flow", "flow.py:", ":flow", "flow.py:a b", "C:\\flow"])
def test_where_must_name_a_file(where):
    with pytest.raises(
        FlowError, match=r"expected FLOW\.py, or FLOW\.py:function, for example examples/digits\.py:flow"
    ):
        load_flow(where)


def test_a_missing_file_or_function_is_named(tmp_path, flow):
    with pytest.raises(FlowError, match=r"gone\.py: no such file; expected a Python file with a function 'flow'"):
        load_flow(f"{tmp_path / 'gone.py'}:flow")
    with pytest.raises(FlowError, match=r"demo\.py has no function 'flaw'; did you mean 'flow'\?"):
        flow("pass", name="flaw")
    with pytest.raises(FlowError, match=r"demo\.py has no function 'zzz'; it has flow"):
        flow("pass", name="zzz")
    with pytest.raises(FlowError, match=r"demo\.py:x: expected a function that takes no arguments \("):
        flow("pass", name="x")
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(FlowError, match=r"notes\.txt: not a Python file: its name must end in \.py"):
        load_flow(f"{tmp_path / 'notes.txt'}:flow")


def test_a_function_with_arguments_is_refused(tmp_path):
    file = tmp_path / "demo.py"
    file.write_text("def flow(size): ...\n", encoding="utf-8")
    with pytest.raises(FlowError, match=r"takes no arguments \(missing a required argument: 'size'\)"):
        load_flow(f"{file}:flow")


def test_a_flow_imports_its_neighbours_and_defines_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_flow.py").write_text(HEAD, encoding="utf-8")
    file = tmp_path / "demo.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_flow import model, x\n"
        "@dataclass\nclass Data:\n    batches: list\n"
        "def flow():\n    return model, x, Data([x]).batches\n",
        encoding="utf-8",
    )
    assert len(load_flow(f"{file}:flow").batches) == 1
