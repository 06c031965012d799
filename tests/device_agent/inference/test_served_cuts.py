"""`kill -9` of the agent around its swaps: its inference process dies with it, the next one serves a whole version."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess  # noqa: TID251 - agents that are killed
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from edge_server.fleet.broker import free_port
from tests.device_agent.agent_side import is_alive, until

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
ROOT, MEMORY = Path(__file__).parents[3], Path("/dev/shm")  # noqa: S108 - a disk that syncs at once
KILLS, SEED, PATIENCE_S = 8, 7, 300.0
PARENT = """
import asyncio, sys
from device_agent.inference.process import InferenceProcess
from device_agent.inference.settings import InferenceSettings

async def main():
    process = InferenceProcess(InferenceSettings(port=0, socket=sys.argv[1], memory_bytes=2 << 30), None, {})
    running = asyncio.create_task(process.run())
    await process.ready.wait()
    print(process.pid, flush=True)
    await running

asyncio.run(main())
"""


def test_after_every_cut_a_whole_version_answers_at_the_same_port():
    """See `served_cuts`: nothing of the agent before is left, or the port would not be free."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        told = map(str, (name, free_port(), SEED, KILLS))
        done = subprocess.run(  # noqa: S603 - ours
            [sys.executable, "-m", "tests.device_agent.inference.served_cuts", *told],
            cwd=ROOT,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # it forks
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert sum(found["phases"].values()) == KILLS
    assert found["committed"] >= 1


def test_a_process_that_cannot_look_at_its_input_dies_with_its_agent_too(tmp_path):
    """As one that opens a large model does; here it is stopped."""
    with subprocess.Popen(  # noqa: S603 - ours
        [sys.executable, "-c", PARENT, str(tmp_path / "s")], cwd=ROOT, stdout=subprocess.PIPE
    ) as agent:
        pid = int(agent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        agent.kill()
    asyncio.run(until(lambda: not is_alive(pid), 60.0))
