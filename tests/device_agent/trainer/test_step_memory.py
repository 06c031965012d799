"""Memory settings of a trainer process, measured in a fresh one."""

from __future__ import annotations

import ctypes
import os
import subprocess  # noqa: TID251 - asks fresh processes
import sys
from pathlib import Path

import msgspec
import pytest

from device_agent.exchange.outbox import Outbox

ROOT = Path(__file__).parents[3]
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import ctypes, io, resource, sys

if sys.argv[1] == "trainer":
    import msgspec
    from device_agent.trainer.interface import Job
    from device_agent.trainer.main import MessageReader, serve
    from device_agent.trainer.interface import Done, Start, frame

    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    reader, answers = MessageReader(io.BytesIO(frame(Start(job)))), io.BytesIO()
    reader.start()
    serve(reader, answers, 1)
    assert answers.getvalue() == frame(Done()), answers.getvalue()
from shared.runtime.processes import loading
with loading():
    import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def step():
    blocks = [libc.malloc(8 << 20) for _ in range(3)]
    for block in blocks:
        libc.memset(block, 1, 8 << 20)
    for block in blocks:
        libc.free(block)

for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
steps, before = faults() - before, faults()
torch.full((16 << 20,), 1.0)  # larger than what is ever taken from the heap
print(steps, faults() - before)
"""


@pytest.fixture
def faults(tmp_path: Path, make_job, make_task) -> dict[str, list[int]]:
    """Return page faults of ten steps of 24 MiB and of a tensor of 64 MiB, with nothing set and in a trainer."""
    job = make_job(make_task(), Outbox(tmp_path / "outbox", tmp_path / "state").draft("trial", 1))
    foreign = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")  # what a command set that ran in this process
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    found = {}
    for how in ("nothing", "trainer"):
        done = subprocess.run(  # noqa: S603 - ours
            [sys.executable, "-c", PROGRAM, how],
            cwd=ROOT,
            env=environment,
            input=msgspec.msgpack.encode(job),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        found[how] = [int(word) for word in done.stdout.split()]
    return found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library is not glibc >= 2.33")
def test_a_trainer_takes_the_memory_of_its_steps_once_and_large_tensors_in_large_pages(faults):
    """Untuned, what a step frees is given back and taken anew, 6144 pages each time.

    64 MiB in pages of 4 KiB are 16 thousand faults; with huge pages, where a process has to ask for them, few.
    """
    assert faults["trainer"][0] * 10 < faults["nothing"][0]
    if HUGE.exists() and "[madvise]" in HUGE.read_text():
        assert faults["trainer"][1] < faults["nothing"][1] / 3
