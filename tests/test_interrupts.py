"""Ctrl-C in the command line: noted at once, raised between ops, never inside a callback of torch's C++."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pt2qa import _interrupts
from pt2qa._interrupts import Interrupts, raise_if_interrupted
from pt2qa.cli import program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    interrupts = Interrupts()
    monkeypatch.setattr(_interrupts, "heard", interrupts)
    before = signal.signal(signal.SIGINT, interrupts.hear)
    yield interrupts
    interrupts.over = True
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_where_something_asks_and_once(heard: Interrupts) -> None:
    signal.raise_signal(signal.SIGINT)
    assert heard.pressed
    with pytest.raises(KeyboardInterrupt):
        raise_if_interrupted()
    raise_if_interrupted()


def test_if_nothing_asks_it_is_raised_where_python_is(heard: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupts, "GRACE", 0.05)
    signal.raise_signal(signal.SIGINT)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(20)
    assert time.monotonic() - begun < 10


def test_the_second_one_is_raised_at_once(heard: Interrupts) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_when_the_commands_are_over_nothing_is_raised(heard: Interrupts) -> None:
    heard.over = True
    signal.raise_signal(signal.SIGINT)
    raise_if_interrupted()
    assert heard.pressed


class Destroyed:
    """Ctrl-C falls into its destructor, which cannot raise."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        raise_if_interrupted()


def test_one_that_falls_into_a_destructor_is_raised_after_it() -> None:
    with program._heard() as interrupts:
        Destroyed()
        assert interrupts.waiting
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()


def test_without_the_command_line_nothing_is_installed_or_raised() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raise_if_interrupted()


IN_A_CALLBACK = """
import signal
import torch
from pt2qa import _interrupts
from pt2qa.cli import main, program

def commands():
    import click

    @click.command()
    def command():
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: signal.raise_signal(signal.SIGINT))
        y.sum().backward()
        print("the callback returned", flush=True)
        _interrupts.raise_if_interrupted()
        print("never", flush=True)

    return command

program._commands = commands
main()
"""


def test_inside_a_callback_of_torch_it_is_only_noted() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "the callback returned\n")
    assert done.stderr.splitlines()[-1] == "pt2qa: interrupted"


@pytest.mark.parametrize("module", ["logging", "pt2qa._noise", "pt2qa.cli.analyzing", "click", "ctypes"])
def test_while_the_program_imports_there_is_no_traceback(module: str) -> None:
    # Pressed twice as a module is looked up, which raises right there.
    text = f"""
import signal, sys

class Presses:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Presses())
sys.modules.pop({module!r}, None)
from pt2qa.cli import main
sys.argv = ["pt2qa", "quantizers"]
main()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "pt2qa: interrupted\n"
