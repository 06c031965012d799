"""Heavy imports run without garbage collection."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - asks fresh processes
import sys
from pathlib import Path

import pytest

from shared.runtime.processes import loading
from tests.edge_server.harness import write_plan

ROOT = Path(__file__).parents[3]
STAND_IN = "import gc, os\nos.write(2, b'collects: %d' % gc.isenabled())\nos._exit(7)\n"
BLOCK = """
import gc
from shared.runtime.processes import loading

with loading():
    import torch
assert gc.isenabled()
frozen = gc.get_freeze_count()
assert frozen > 1000
kept = [[one] for one in range(5000)]
with loading():
    assert gc.isenabled()
assert gc.get_freeze_count() == frozen
"""


@pytest.fixture(scope="module")
def shadowed(tmp_path_factory) -> Path:
    """Return a folder whose torch ends the process that imports it, and says whether garbage is collected."""
    folder = tmp_path_factory.mktemp("shadow")
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(STAND_IN)
    write_plan(folder)
    (folder / "server.json").write_text(f'{{"plan": "{folder}/plan.toml", "site": "lab", "data_dir": "{folder}/runs"}}')
    return folder


def ended(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - ours
        [sys.executable, *(word.replace("HERE", str(folder)) for word in words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        "edge_server run --config HERE/server.json",
        "edge_server trial run HERE/plan.toml --local 1 --data-dir HERE/runs",
        "edge_server replay HERE/plan.toml --data-dir HERE/runs",
        "edge_server chaos HERE/plan.toml --kills 1 --data-dir HERE/runs",
        "edge_server study HERE/study.toml --data-dir HERE/runs",
        "edge_server models",
        "edge_server.replay.study.worker",
        "device_agent.trainer.main --lock HERE/lock",
        "device_agent.measurement.cpu_load",
    ],
)
def test_what_needs_torch_loads_it_without_collecting(shadowed, words):
    """A third of the CPU seconds of a start went into looking for garbage where none is."""
    done = ended(shadowed, "-m", *words.split())
    assert (done.returncode, done.stderr) == (7, "collects: 0")


def test_collecting_goes_on_and_passes_over_what_was_loaded(tmp_path):
    """A block after it, where torch is there, leaves the collector alone: what lives then may become garbage."""
    (tmp_path / "torch.py").write_text("kept = [[one] for one in range(5000)]\n")
    done = ended(tmp_path, "-c", BLOCK)
    assert done.returncode == 0, done.stderr


def test_an_import_that_fails_leaves_the_collector_on(tmp_path):
    """Nothing heavy has come, so nothing is set aside."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    program = (
        "import gc\nfrom shared.runtime.processes import loading\ntry:\n    with loading():\n        import torch\n"
    )
    program += "except ModuleNotFoundError:\n    print(gc.isenabled(), gc.get_freeze_count())\n"
    assert ended(tmp_path, "-c", program).stdout == "True 0\n"


def test_where_torch_is_loaded_nothing_changes():
    import gc  # noqa: PLC0415

    import torch  # noqa: F401, PLC0415

    before = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
