"""Local worker processes of a study; a process that dies fails only its cell."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from edge_server.replay.study.result import CellEnded, CellStarted, Order
from shared.runtime.logs import last_line
from shared.runtime.processes import wait_or_kill

Tell: TypeAlias = Callable[[CellStarted | CellEnded], None]

MODULE = "edge_server.replay.study.worker"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PATIENCE_S = 10.0
MEMORY = Path("/dev/shm")  # noqa: S108 - temporary files of replays


async def run_locally(orders: Sequence[Order], jobs: int, place: Path, tell: Tell) -> None:
    """Run cells in at most `jobs` processes; all have ended when this returns or is cancelled.

    `place` is the folder of their logs and temporary files.
    """
    queue = deque(orders)
    logs = [place / f"worker-{number}.log" for number in range(min(jobs, len(orders)))]
    await await_all([_work(queue, log, tell) for log in logs])


async def await_all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await several coroutines; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed


async def _work(queue: deque[Order], log: Path, tell: Tell) -> None:
    """Run cells until the queue is empty; replace a process that dies."""
    while queue:
        async with _process(log) as process:
            while queue and process.returncode is None:
                order = queue.popleft()
                tell(CellStarted(order.cell, process.pid))
                tell(CellEnded(order.cell, await _run_order(process, order, log)))


async def _run_order(process: Process, order: Order, log: Path) -> str:
    """Run a cell in a process; return the cause of its failure, or an empty text."""
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        answer = b""
    else:
        answer = await process.stdout.readline()
    if answer.endswith(b"\n"):
        return msgspec.json.decode(answer, type=str)
    code = await process.wait()
    if code < 0:
        memory = "; possibly out of memory: give fewer --jobs" if code == -signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{memory}; see {log}"
    return f"its process ended with exit code {code}: {last_line(log)}; see {log}"


@asynccontextmanager
async def _process(log: Path) -> AsyncIterator[Process]:
    """Start a worker in its own session, so that Ctrl-C reaches only the study; end it after the block.

    The worker also exits when its input ends, for example when the study is killed.
    """
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=PIPE,
            stdout=PIPE,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **dict.fromkeys(THREADS, "1"), "TMPDIR": str(log.parent.resolve())},
        )
    try:
        yield process
    finally:
        assert process.stdin
        process.stdin.close()
        await wait_or_kill(process, PATIENCE_S)
        remove_leftovers(process.pid)


def remove_leftovers(process: int) -> None:
    """Remove the files in memory of a killed process; other processes leave none."""
    for leftover in MEMORY.glob(f"fieldfleet-{process}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
