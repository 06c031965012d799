"""Child processes end when told to, and also where they do not listen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process

import pytest

from shared.runtime.processes import kill, terminate, wait_or_kill

LIMIT_S = 300.0
READS = "import sys; print('up', flush=True); sys.stdin.read()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READS


def end(script: str, how) -> int:
    """Start a child, end it once it is up, and return its exit code."""

    async def story() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdin=PIPE, stdout=PIPE)
        assert await process.stdout.readline() == b"up\n"
        await how(process)
        await how(process)  # of one that is gone nothing is wanted
        assert process.returncode is not None
        return process.returncode

    return asyncio.run(asyncio.wait_for(story(), LIMIT_S))


async def close_input(process: Process) -> None:
    process.stdin.close()
    await wait_or_kill(process)


async def terminate_soon(process: Process) -> None:
    await terminate(process, patience_s=0.2)


@pytest.mark.parametrize(
    ("script", "how", "code"),
    [
        (READS, close_input, 0),
        (READS, terminate, -signal.SIGTERM),
        (DEAF, terminate_soon, -signal.SIGKILL),
        (READS, kill, -signal.SIGKILL),
    ],
    ids=["input closed", "asked", "deaf", "killed"],
)
def test_a_child_ends(script: str, how, code: int) -> None:
    assert end(script, how) == code


def test_of_a_child_that_was_killed_just_now_the_signal_is_told(monkeypatch) -> None:
    """It has ended and asyncio does not know yet: to end it leaves its exit status to asyncio."""
    known, reap = threading.Event(), os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        assert known.wait(LIMIT_S)
        return reap(pid, options)

    async def killed(process: Process) -> None:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - at once
            asyncio.get_running_loop().call_soon(known.set)
        await terminate(process)

    monkeypatch.setattr(os, "waitpid", late)
    assert end(READS, killed) == -signal.SIGKILL


async def test_where_memory_runs_out_a_child_offers_itself() -> None:
    """The kernel takes a process of 500 rather than the one that started it, however much that has."""
    script = (
        "from shared.runtime.memory import prefer_oom_kill; prefer_oom_kill(); "
        "print(open('/proc/self/oom_score_adj').read())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE)
    assert int((await process.communicate())[0]) == 500
