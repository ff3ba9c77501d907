"""Without executorch everything but XNNPACK works, and what needs it names the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pt2qa

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "executorch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
"""An environment without executorch, for a process of its own."""

ANALYSES = """
import torch, pt2qa
from pt2qa import plugins

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 4)).eval()
batches = [torch.randn(2, 3, 6, 6) for _ in range(2)]
capture = pt2qa.capture(model, batches[0])
assert "xnnpack" not in plugins.available(), plugins.available()
pair = pt2qa.quantize(capture, "x86", batches, progress=False)
assert pt2qa.compare_layers(pair, batches, progress=False).rows
assert pt2qa.compare_weights(pair).rows
assert pt2qa.annotations(pair).rows
assert pt2qa.sensitivity(pair, batches, progress=False).rows
assert pt2qa.find_bad_cases(pair, batches, k=1, progress=False).rankings
pt2qa.check(pair, batches=batches)
assert pt2qa.reconfigure(pair, batches, target=5, progress=False).pair is not None
try:
    pt2qa.quantize(capture, "xnnpack", batches)
except pt2qa.PluginError as error:
    print(error)
assert not [name for name in sys.modules if name.partition(".")[0] == "executorch"]
"""

MESSAGE = (
    f"quantizer 'xnnpack' (pt2qa_xnnpack:PLUGIN of pt2qa {pt2qa.__version__}) cannot be loaded: "
    'ModuleNotFoundError: executorch is not installed: pip install "pt2qa[xnnpack]"'
)


def told_without_executorch(code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", BLOCKED + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_x86_works_and_the_error_for_xnnpack_names_the_extra() -> None:
    assert MESSAGE in told_without_executorch(ANALYSES)


def test_the_command_lists_the_plugin_with_the_reason() -> None:
    code = "from pt2qa.cli import main\nimport sys\nsys.argv = ['pt2qa', 'quantizers']\nsys.exit(main())"
    told = told_without_executorch(code)
    assert "x86" in told
    assert MESSAGE in " ".join(told.split())
