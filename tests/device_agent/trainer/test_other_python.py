"""The trainer on another interpreter than the agent's, and what it imports."""

from __future__ import annotations

import asyncio
import json
import subprocess  # noqa: TID251 - what an interpreter loads is seen in one of its own
import sys
from pathlib import Path

import pytest

from device_agent.hardware.tools import run_module
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from shared.errors import TaskFailed
from shared.runtime.interpreter import find_interpreter
from tests.naming import names_all, naming

LOADED = {"msgspec", "numpy", "safetensors", "torch", "xxhash"}
"""All of which have releases for Python 3.10."""
ASKED = """
import json, sys
before = set(sys.modules)
import device_agent.trainer.main, device_agent.trainer.perform, device_agent.trainer.evaluation
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_the_trainer_imports_few_libraries():
    """What torch itself brings along is its own business."""
    without = "import torch, numpy\n" + ASKED
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=True)  # noqa: S603
    found = set(json.loads(done.stdout)) - sys.stdlib_module_names
    ours = {"device_agent", "shared", "firmware_profiles"}
    assert {name for name in found if not name.startswith("_")} - ours <= LOADED


@pytest.fixture
def other(tmp_path) -> Path:
    """Return another interpreter, of an environment that sees this one's libraries."""
    place = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)  # noqa: S603 - ours
    [library] = place.glob("lib/python3.*/site-packages")
    own = next(path for path in sys.path if path.endswith("site-packages"))
    (library / "these.pth").write_text(f"{own}\n")
    return place / "bin/python"


def started(pid: int) -> str:
    """Return the program of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


async def test_a_trainer_runs_on_the_interpreter_that_is_named(tmp_path, other):
    trainer = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1, python=str(other)))
    await trainer.ready()
    try:
        while not (program := started(trainer.pid)):  # noqa: ASYNC110 - empty while the kernel replaces the program
            await asyncio.sleep(0.01)
        assert program == str(other)
    finally:
        await trainer.close()


def test_it_trains_there(other):
    """The doctor's three steps."""
    ended = run_module(
        "device_agent.hardware.library_smoke_test", "torch", timeout_s=120.0, interpreter=find_interpreter(str(other))
    )
    assert ended.exit_code == 0, ended.stderr
    assert names_all(json.loads(ended.stdout.splitlines()[-1])["done"], "CPU", "Python 3")
    assert (
        run_module("device_agent.trainer.has_torch", timeout_s=60.0, interpreter=find_interpreter(str(other))).exit_code
        == 0
    )


def test_an_interpreter_that_is_not_there_fails_the_task_with_the_remedy(tmp_path):
    trainer = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1, python="/no/python"))
    with pytest.raises(TaskFailed, match=naming("trainer.python", "/no/python")):
        asyncio.run(trainer.ready())
