"""Plug-ins are found by entry point, configured by text or keyword, and refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal

import click
import pytest
import torch
from click.testing import CliRunner
from torch.fx.graph import CodeGen

from pt2qa.cli import main, options
from pt2qa.errors import PluginError
from pt2qa.plugins import (
    BACKENDS,
    GROUP,
    GenericPlugin,
    attribute_of,
    available,
    backends,
    describe,
    observing,
    onednn_has_vnni,
    options_of,
    quantizer,
    registry,
    resolve,
    unavailable,
    with_outputs,
)


@dataclass(frozen=True)
class Toy:
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "a plug-in of another package"

    mode: Literal["static", "dynamic"] = "static"
    per_channel: bool = field(default=True, metadata={"help": "a scale for each channel"})
    bits: int | None = None
    share: float = 0.5
    label: str = ""
    modules: Mapping[str, object] = field(default_factory=dict)

    def build(self, graph: Any, *, qat: bool) -> Any:
        return None


TOY = Toy()
NOT_A_PLUGIN = {"name": "toy"}


class Nameless:
    """Has a build, but is no dataclass with name and summary."""

    def build(self, graph: Any, *, qat: bool) -> Any:
        return None


NAMELESS = Nameless()

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes these the only installed plug-ins."""

    def _install(*named: tuple[str, str]) -> None:
        entries = [EntryPoint(name, value, GROUP) for name, value in named]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == GROUP else [])

    return _install


def told(action: Callable[[], object]) -> str:
    with pytest.raises(PluginError) as caught:
        action()
    return str(caught.value)


HERE = __name__


def test_installed_plugins_are_found_with_their_default_options() -> None:
    found = available()
    assert set(found) >= {"tosa", "x86", "xnnpack"}
    assert unavailable() == {}
    assert all(plugin.name == name and plugin.summary for name, plugin in found.items())


def test_finding_plugins_imports_neither_torch_nor_a_backend() -> None:
    code = (
        "import sys; from pt2qa.plugins import available, resolve; available(); resolve('xnnpack:per_channel=false'); "
        "print([name for name in ('torch', 'torchao', 'executorch') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_broken_plugin_is_reported_by_name_and_hides_no_other(install: Install) -> None:
    install(("bad", "no_such_package_at_all:PLUGIN"), ("toy", f"{HERE}:TOY"))
    assert set(available()) == {"toy"}
    assert list(unavailable()) == ["bad"]
    assert (
        told(lambda: quantizer("bad"))
        == unavailable()["bad"]
        == (
            "quantizer 'bad' (no_such_package_at_all:PLUGIN) cannot be loaded: "
            "ModuleNotFoundError: No module named 'no_such_package_at_all'"
        )
    )
    assert quantizer("toy").name == "toy"


@pytest.mark.parametrize("attribute", ["NOT_A_PLUGIN", "Toy", "NAMELESS"])
def test_what_is_no_plugin_is_said_to_be_none(install: Install, attribute: str) -> None:
    install(("toy", f"{HERE}:{attribute}"))
    text = told(lambda: quantizer("toy"))
    assert text.startswith(f"quantizer 'toy' ({HERE}:{attribute}) is not a plug-in: got ")
    assert text.endswith("expected an instance of a frozen dataclass with name, summary and build(graph, *, qat)")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install(("toy", f"{HERE}:TOY"), ("toy", f"{HERE}:NAMELESS"))
    assert told(lambda: quantizer("toy")) == (
        f"quantizer 'toy' is offered by {HERE}:TOY and {HERE}:NAMELESS: uninstall one of them"
    )


def test_one_plugin_listed_twice_is_one_plugin(install: Install) -> None:
    install(("toy", f"{HERE}:TOY"), ("toy", f"{HERE}:TOY"))
    assert quantizer("toy") == TOY


def test_a_plugin_that_goes_by_another_name_is_refused(install: Install) -> None:
    install(("toys", f"{HERE}:TOY"))
    assert told(lambda: quantizer("toys")).endswith("calls itself 'toy': the two names must be equal")


def test_an_unknown_name_lists_near_names_and_what_is_installed() -> None:
    text = told(lambda: quantizer("xnpack"))
    assert text.startswith("no quantizer is named 'xnpack'; did you mean 'xnnpack'? Installed: ")
    assert told(lambda: quantizer("zzz")).startswith("no quantizer is named 'zzz'. Installed: ")


def test_nothing_installed_is_said(install: Install) -> None:
    install()
    assert told(lambda: quantizer("x86")) == (
        "no quantizer is named 'x86'. Installed: none: no installed package has an entry point in the group "
        "pt2qa.quantizers"
    )


def test_options_are_set_by_keyword(install: Install) -> None:
    install(("toy", f"{HERE}:TOY"))
    assert quantizer("toy", mode="dynamic", bits=4) == Toy(mode="dynamic", bits=4)
    assert Toy() == TOY


def test_an_unknown_option_lists_near_names_and_all_options(install: Install) -> None:
    install(("toy", f"{HERE}:TOY"))
    assert told(lambda: quantizer("toy", perchannel=True)) == (
        "quantizer 'toy' has no option 'perchannel'; did you mean 'per_channel'? Its options: mode (static|dynamic), "
        "per_channel (true|false), bits (int|none), share (float), label (str), modules (mapping)"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "statc"}, "option mode: got 'statc', expected static|dynamic; did you mean 'static'?"),
        ({"mode": True}, "option mode: got True, expected static|dynamic."),
        ({"per_channel": "false"}, "option per_channel: got 'false', expected true|false."),
        ({"per_channel": 1}, "option per_channel: got 1, expected true|false."),
        ({"bits": True}, "option bits: got True, expected int|none."),
        ({"bits": 4.0}, "option bits: got 4.0, expected int|none."),
        ({"share": "half"}, "option share: got 'half', expected float."),
        ({"label": None}, "option label: got None, expected str."),
        ({"modules": ["fc"]}, "option modules: got ['fc'], expected mapping."),
    ],
)
def test_a_value_of_another_type_is_refused(install: Install, options: dict[str, Any], text: str) -> None:
    install(("toy", f"{HERE}:TOY"))
    assert told(lambda: quantizer("toy", **options)) == f"quantizer 'toy': {text}"


@pytest.mark.parametrize(
    ("spec", "plugin"),
    [
        ("toy", Toy()),
        ("toy:", Toy()),
        ("toy:per_channel=false,mode=dynamic", Toy(per_channel=False, mode="dynamic")),
        (" toy : per_channel = No , bits = 4 ", Toy(per_channel=False, bits=4)),
        ("toy:bits=none,share=1,label=x=y", Toy(share=1.0, label="x=y")),
    ],
)
def test_text_is_read_by_the_types_of_the_options(install: Install, spec: str, plugin: Toy) -> None:
    install(("toy", f"{HERE}:TOY"))
    assert resolve(spec) == plugin


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("toy:dynamic", "quantizer 'toy': got 'dynamic', expected option=value"),
        ("toy:bits=four", "quantizer 'toy': option bits: got 'four', expected int|none."),
        (
            "toy:mode=dynmic",
            "quantizer 'toy': option mode: got 'dynmic', expected static|dynamic; did you mean 'dynamic'?",
        ),
        ("toy:bits=1,bits=2", "quantizer 'toy': option bits is given twice"),
        (
            "toy:modules=fc",
            "quantizer 'toy': option modules takes a mapping, which cannot be given as text; "
            "write pt2qa.quantizer('toy', modules=...) in Python",
        ),
    ],
)
def test_text_that_cannot_be_read_is_refused(install: Install, spec: str, text: str) -> None:
    install(("toy", f"{HERE}:TOY"))
    assert told(lambda: resolve(spec)) == text


@pytest.mark.parametrize("plugin", [Toy(), Toy(per_channel=False, bits=4, mode="dynamic"), Toy(share=0.25)])
def test_a_description_resolves_to_the_same_plugin(install: Install, plugin: Toy) -> None:
    install(("toy", f"{HERE}:TOY"))
    assert resolve(describe(plugin)) == plugin
    assert describe(Toy(per_channel=False, bits=4)) == "toy:per_channel=false,bits=4"


def test_options_say_what_they_take() -> None:
    option = options_of(Toy())[1]
    assert (option.name, option.values, option.default, option.help) == (
        "per_channel",
        "true|false",
        True,
        "a scale for each channel",
    )


def test_a_plugin_object_is_taken_as_it_is() -> None:
    plugin = Toy(bits=4)
    assert resolve(plugin) is plugin


def test_a_torchao_quantizer_object_is_taken_as_it_is() -> None:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    own = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    plugin = resolve(own)
    assert isinstance(plugin, GenericPlugin)
    assert (plugin.name, plugin.build(torch.fx.GraphModule({}, torch.fx.Graph()), qat=False)) == (
        "X86InductorQuantizer",
        own,
    )
    assert plugin.summary.endswith("x86_inductor_quantizer.X86InductorQuantizer, as it was configured")


def test_a_quantizer_for_the_other_kind_of_training_is_refused() -> None:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    own = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    assert resolve(own).build(graph, qat=True) is own
    assert told(lambda: resolve(own).build(graph, qat=False)) == (
        "X86InductorQuantizer was configured with is_qat=True, but qat=False was requested: "
        "configure it with is_qat=False, or quantize with qat=True"
    )


def test_a_quantizer_class_is_refused() -> None:
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

    assert told(lambda: resolve(X86InductorQuantizer)) == (
        "got the class torchao.quantization.pt2e.quantizer.x86_inductor_quantizer.X86InductorQuantizer, expected an "
        "instance of it: write X86InductorQuantizer() and configure it"
    )
    assert "write Toy() and configure it" in told(lambda: resolve(Toy))


def test_a_quantizer_of_another_package_is_refused() -> None:
    base = type("Quantizer", (), {"__module__": "torch.ao.quantization.quantizer.quantizer"})
    foreign = type("OldQuantizer", (base,), {"__module__": "old_backend"})()
    text = told(lambda: resolve(foreign))
    assert text.startswith(
        "got old_backend.OldQuantizer, expected torchao.quantization.pt2e.quantizer.quantizer.Quantizer: "
        "it derives from torch.ao.quantization.quantizer.quantizer.Quantizer. pt2qa prepares with torchao"
    )


def test_something_that_only_looks_like_a_quantizer_is_refused() -> None:
    class Lookalike:
        def annotate(self, model: Any) -> Any:
            return model

    assert "it does not derive from it. pt2qa prepares with torchao" in told(lambda: resolve(Lookalike()))


@pytest.mark.parametrize("spec", [None, 8, ["xnnpack"], {"name": "x86"}])
def test_anything_else_is_refused(spec: object) -> None:
    assert told(lambda: resolve(spec)) == (
        f"got {spec!r} (builtins.{type(spec).__name__}), expected the name of a quantizer plug-in, a plug-in, or a "
        "torchao Quantizer object"
    )


def test_backends_are_those_of_quantizers_and_those_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        GROUP: [EntryPoint("x86", "pt2qa_x86:PLUGIN", GROUP)],
        BACKENDS: [
            EntryPoint("onnxruntime", "pt2qa_onnxruntime:BACKEND", BACKENDS),
            EntryPoint("openvino", "pt2qa_openvino:BACKEND", BACKENDS),
            EntryPoint("bad", f"{HERE}:TOY", BACKENDS),
        ],
    }
    monkeypatch.setattr(registry, "entry_points", lambda group: entries[group])
    assert {name: backend.name for name, backend in backends().items()} == {
        "x86": "Inductor with oneDNN",
        "onnxruntime": "ONNX Runtime",
        "openvino": "OpenVINO",
    }
    assert list(available()) == ["x86"]
    assert unavailable()["bad"].startswith(f"backend 'bad' ({HERE}:TOY) is not a plug-in: got Toy(")
    assert "the members of pt2qa.plugins.Backend" in unavailable()["bad"]


def test_a_backend_whose_packages_are_absent_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import pt2qa_arm
    import pt2qa_onnxruntime
    import pt2qa_openvino

    monkeypatch.setattr(pt2qa_arm.internals, "find_spec", lambda name: None)
    monkeypatch.setattr(pt2qa_onnxruntime.backend, "find_spec", lambda name: None)
    monkeypatch.setattr(pt2qa_openvino.backend, "find_spec", lambda name: None)
    assert pt2qa_onnxruntime.BACKEND.missing() == (
        "onnxruntime, onnx, onnxscript not installed: pip install 'pt2qa[onnxruntime]'"
    )
    assert pt2qa_openvino.BACKEND.missing() == "openvino not installed: pip install 'pt2qa[openvino]'"
    absent = "executorch, tosa-tools, ml_dtypes not installed: pip install 'pt2qa[arm]'"
    assert pt2qa_arm.PLUGIN.backend.missing() == absent
    graph = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    assert told(lambda: pt2qa_arm.PLUGIN.build(graph, qat=False)) == f"quantizer 'tosa': {absent}"
    assert f"quantizer 'tosa': {absent}" in CliRunner().invoke(main, ["quantizers"]).stderr
    taken: list[tuple[str, ...]] = []

    @click.command()
    @options.quantizers
    def command(specs: tuple[str, ...]) -> None:
        taken.append(specs)

    for arguments in ([], ["-q", "tosa"]):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert taken == [tuple(sorted({*available()} - {"tosa"})), ("tosa",)]


def test_a_value_that_an_op_in_place_changes_is_returned_as_it_was_made() -> None:
    class InPlace(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            y.mul_(2)
            return y.relu()

    graph = torch.export.export(InPlace(), (torch.ones(2),)).module()
    graph.graph.set_codegen(CodeGen())
    add = next(node.name for node in graph.graph.nodes if "add" in node.name)
    returned = with_outputs(graph, [add])(torch.ones(2))
    assert [each.tolist() for each in returned] == [[4.0, 4.0], [2.0, 2.0]]


def test_what_a_node_reads_from_the_graph_is_its_weight_detached_and_nothing_else_is() -> None:
    linear = torch.nn.Linear(2, 2)
    graph = torch.export.export(linear, (torch.ones(2),)).module()
    weight, bias = (attribute_of(graph, node) for node in graph.graph.find_nodes(op="get_attr"))
    assert torch.equal(weight, linear.weight)
    assert torch.equal(bias, linear.bias)
    assert weight.data_ptr() == linear.weight.data_ptr()
    assert not weight.requires_grad
    (computed,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [attribute_of(graph, each) for each in (computed, 0.5, None)] == [None, None, None]


def test_taps_that_disturb_are_found_by_halves() -> None:
    lost: dict[str, str] = {}
    tried: list[list[str]] = []

    def attempt(names: list[str]) -> tuple[str, str]:
        tried.append(names)
        return " ".join(names), "it disturbs" if "c" in names else ""

    assert observing(["a", "b", "c", "d"], attempt, lost) == "a b d"
    assert lost == {"c": "it disturbs"}
    assert tried[0] == ["a", "b", "c", "d"]
    assert observing([], attempt, lost) is None


@pytest.mark.parametrize(
    ("limit", "can", "has"),
    [
        ("", {"avx2"}, False),
        ("", {"avx2", "avx_vnni"}, True),
        ("", {"avx512_vnni"}, True),
        ("avx2", {"avx_vnni", "avx512_vnni"}, False),
        ("AVX2_VNNI", {"avx_vnni"}, True),
        ("AVX2_VNNI", {"avx512_vnni"}, False),
        ("AVX512_CORE", {"avx512_vnni"}, False),
        ("AVX512_CORE_VNNI", {"avx512_vnni"}, True),
    ],
)
def test_vnni_is_what_the_cpu_has_and_onednn_may_use(
    limit: str, can: set[str], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(can, True))
    assert onednn_has_vnni() == has
