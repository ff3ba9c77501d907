"""What ``make mutants`` counts: a fault that a test notices is killed, and one that changes nothing survives."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.mutants.__main__ import tests_for as chosen_for
from tests.mutants.lines import Lines
from tests.mutants.mutations import Mutation, mutated, mutations
from tests.mutants.rooms import DEFAULTS, ROOMS
from tests.mutants.worker import ROOT

SOURCE = '''
"""A module."""
LIMIT: int = 3


def find(values, low=0, *, strict=True):
    """The first value that is large."""
    if not values:
        raise ValueError(f"no {low} values")
    total = sum(value for value, _ in zip(values, values, strict=True) if value > low)
    return min(total, LIMIT) - 1 if strict and total else None
'''

TRIAL = """
# Once, and not in each fork: what tests/conftest.py imports.
import executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils
import torchao.quantization.pt2e.qat_utils
import torchao.quantization.pt2e.reference_representation_rewrite

from tests.mutants.worker import ROOT, trial

path, tests = "pt2qa/_printable.py", ["tests/test_printable.py", "-k", "control_escape"]
source = (ROOT / path).read_text()
for each in (source, source.replace("return ", "return not ")):
    print(trial(path, each, tests, 120).wait())
print(trial(path, "import time\\ntime.sleep(60)", tests, 2).wait())
"""


def test_every_fault_changes_the_code_and_none_a_text() -> None:
    found = mutations("pt2qa/x.py", SOURCE)
    sources = {mutated(each, SOURCE) for each in found}
    assert len(sources) == len(found) > 12
    assert ast.unparse(ast.parse(SOURCE)) not in sources
    assert all("no {low} values" in source and '"""A module."""' in source for source in sources)
    assert all("strict=True" in source for source in sources)
    changes = {f"{each.before} -> {each.after}" for each in found}
    assert {
        "3 -> 4",
        "not values -> values",
        "value > low -> value >= low",
        "min -> max",
        "strict and total -> strict or total",
        "min(total, LIMIT) - 1 -> min(total, LIMIT) + 1",
        "True -> False",
    } <= changes
    assert {each.before for each in found if not each.called} == {"3", "0", "True"}


def test_every_room_and_its_tests_exist() -> None:
    missing = [name for room, tests in ROOMS.items() for name in (room, *tests) if not (ROOT / name).exists()]
    assert missing == []


def test_what_imports_make_is_looked_at_by_the_test_of_defaults() -> None:
    known = {"tests/report": Lines({}, [f"{DEFAULTS}::test_a", "tests/report/test_b.py::test_b"], [1.0, 2.0])}
    default = Mutation("pt2qa/_weights/report.py", 0, 77, "False", "True", called=False)
    assert chosen_for(default, known) == ([f"{DEFAULTS}::test_a"], 1.0)
    assert chosen_for(replace(default, called=True), known) == ([], 0.0)


@pytest.mark.skipif(os.name != "posix", reason="fork as POSIX has it")
def test_a_fault_is_killed_the_code_as_it_is_survives_and_what_never_ends_is_stopped() -> None:
    # A process of its own: this one has loaded the library.
    command = [sys.executable, "-W", "ignore", "-c", TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["survived", "killed", "slow"], done.stderr
