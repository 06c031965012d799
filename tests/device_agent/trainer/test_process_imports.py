"""What a trainer loads for a split session; a fresh interpreter is asked, for here everything is loaded."""

from __future__ import annotations

import subprocess  # noqa: TID251 - a fresh interpreter is the point
import sys
from pathlib import Path

import msgspec

from device_agent.exchange.outbox import Outbox
from tests.device_agent.server_side import below, split

PROGRAM = """
import sys
import msgspec
from device_agent.trainer.interface import Job
from shared.runtime.processes import loading
with loading():
    import torch
from device_agent.trainer.workspace import Workspace
from device_agent.trainer.perform import begin_split_training
from tests.device_agent.agent_side import METER
from tests.device_agent.server_side import STEPS, finish

job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
assert finish(begin_split_training(job, Workspace(), METER.task, lambda: False)) == STEPS
print(*(name for name in ("sympy", "torch._dynamo", "torch._inductor", "onnxruntime") if name in sys.modules), "done")
"""


def test_a_split_session_loads_neither_a_compiler_nor_an_algebra(
    tmp_path: Path, make_job, make_task, parameters
) -> None:
    """From the job to the written update: they would be 75 MB of a board's memory, and seconds of its time."""
    draft = Outbox(tmp_path / "outbox", tmp_path / "state").draft("trial", 1)
    job = msgspec.structs.replace(make_job(split(make_task()), draft), params=below(tmp_path, parameters))
    child = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", PROGRAM],
        input=msgspec.msgpack.encode(job),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=False,
    )
    assert child.stdout.split() == [b"done"], child.stderr.decode()
