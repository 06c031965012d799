"""What glibc's allocator keeps and what it maps; asked of a fresh process, since the setting is the process's own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess  # noqa: TID251 - asks a fresh process
import sys
from pathlib import Path

import pytest

from shared.runtime import malloc

ROOT = Path(__file__).parents[3]
ASK = """
import ctypes, sys
from shared.runtime import malloc

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info
if sys.argv[1] == "tune":
    malloc.tune()
mapped = libc.mallinfo2().hblks
frame, tensor = libc.malloc(1 << 20), libc.malloc(8 << 20)
print(libc.mallinfo2().hblks - mapped)
before = libc.mallinfo2().arena
libc.free(frame)
print(before - libc.mallinfo2().arena < 1 << 20)
libc.free(tensor)
print(libc.mallinfo2().hblks - mapped <= 0)
"""


async def ask(how: str, environment: dict[str, str]) -> list[str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ASK, how),
        cwd=ROOT,
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    assert child.returncode == 0
    return output.decode().split()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library is not glibc >= 2.33")
@pytest.mark.parametrize(
    ("how", "environment"), [("tune", {}), ("", malloc.ENVIRONMENT)], ids=["in our process", "in another program"]
)
def test_frames_are_kept_and_tensors_are_mapped(how, environment):
    """A block of 1 MiB comes from the heap and stays there when freed; one of 8 MiB is mapped, and given back at once.

    Untuned, both are mapped: that is what the first assertion tells apart.
    """
    assert asyncio.run(ask("", {}))[0] == "2"
    assert asyncio.run(ask(how, environment)) == ["1", "True", "True"]


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import resource, sys
from shared.runtime import malloc
if sys.argv[1] != "plain":
    malloc.enable_huge_pages()
if sys.argv[1] == "tuned":
    malloc.tune(*malloc.STEPS)
import torch
from shared.models.spu import spu_emnist

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

steps, count = 0, 60 if sys.argv[1] != "plain" else 0
torch.set_num_threads(1)
layers = spu_emnist().layers.to(memory_format=torch.channels_last)
inputs = torch.ones(16, 1, 28, 28)
for step in range(count):
    before = faults()
    layers(inputs).sum().backward()
    steps += (faults() - before) * (step >= 20)
before = faults()
torch.full((16 << 20,), 1.0)  # larger than what is ever taken from the heap
print(steps, faults() - before)
"""


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    """Return page faults of forty steps (of none where plain) and of a large tensor, by what is set."""
    found = {}
    for how in ("plain", "huge", "tuned"):
        words = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)  # noqa: S603 - ours
        steps, tensor = map(int, done.stdout.split())
        found[how] = steps, tensor
    return found


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this kernel has no transparent huge pages"
)
def test_a_large_tensor_costs_few_page_faults(counted):
    """64 MiB in pages of 4 KiB are 16 thousand faults; with huge pages, where the system is free to give them, few."""
    faults = [counted[how][1] for how in ("plain", "huge")]
    if faults[0] < 4000:
        pytest.skip("this system gives huge pages to everybody")
    assert faults[1] < faults[0] / 3


def test_steps_take_their_memory_once(counted):
    """Untuned, the pages of each step's tensors are given back and taken anew, a hundred or two a step."""
    faults = [counted[how][0] for how in ("huge", "tuned")]
    if faults[0] < 2000:
        pytest.skip("this allocator keeps what is freed")
    assert faults[1] < faults[0] / 3
