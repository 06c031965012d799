"""The interpreter of processes that train and serve: this one, the one that setup brought libraries for, or another."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - another interpreter runs
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.runtime import interpreter
from shared.runtime.interpreter import NOTE, OWN, Interpreter, find_interpreter
from tests.naming import names_all, naming

ROOT = Path(__file__).parents[3]


@pytest.fixture
def extras(tmp_path, monkeypatch) -> Path:
    """Return the folder where `setup` of a package would have brought libraries."""
    monkeypatch.setattr(interpreter, "is_packaged", lambda: True)
    monkeypatch.setattr(interpreter, "setup_pth_path", lambda: tmp_path / "_setup.pth")
    (tmp_path / "_setup.pth").write_text(f"{tmp_path / 'current'}\n")
    (tmp_path / "current").mkdir()
    return tmp_path / "current"


def test_without_a_word_it_is_this_very_one():
    found = find_interpreter()
    assert found == Interpreter()
    assert found.command("a.module", "x") == [sys.executable, "-m", "a.module", "x"]
    assert found.environment({"OMP_WAIT_POLICY": "PASSIVE"}) == {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def test_libraries_for_this_python_are_loaded_by_this_python(extras):
    (extras / NOTE).write_text(f"/usr/bin/{OWN}\n")
    assert find_interpreter() == Interpreter()


def test_libraries_for_another_python_are_loaded_by_that_one(extras, tmp_path):
    """As those that NVIDIA builds for JetPack 6's Python 3.10, where the agent runs on another."""
    other = tmp_path / "python3.2"
    other.symlink_to(sys.executable)
    (extras / NOTE).write_text(f"{other}\n")
    found = find_interpreter()
    assert found == Interpreter(str(other), (str(ROOT), str(extras)))
    done = subprocess.run(  # noqa: S603 - this Python
        [found.python, "-c", "import shared, sys; print(shared.__path__[0])"],
        env=found.environment(),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(ROOT / "shared")


def test_a_system_whose_python_was_replaced_is_told_what_to_do(extras):
    """A JetPack upgrade takes /usr/bin/python3.10 away; nothing else of the agent's is touched."""
    (extras / NOTE).write_text("/usr/bin/python3.2\n")
    with pytest.raises(ConfigError, match=naming("python3.2", "`sudo device-agent setup train`")) as raised:
        find_interpreter()
    assert names_all(raised.value, OWN.removeprefix("python"))


@pytest.mark.parametrize("note", ["", "rm -rf /", "/usr/bin/perl", "/usr/bin/python3.10 -c 1", "\n/usr/bin/sh"])
def test_a_note_that_names_no_python_is_none(extras, note):
    (extras / NOTE).write_text(note)
    assert find_interpreter() == Interpreter()


def test_the_operators_word_counts_before_the_note(extras, tmp_path):
    (extras / NOTE).write_text("/usr/bin/python3.2\n")
    named = tmp_path / "mine"
    named.symlink_to(sys.executable)
    assert find_interpreter(str(named)).python == str(named)
    with pytest.raises(ConfigError, match=naming("trainer.python", "/no/python")):
        find_interpreter("/no/python")
