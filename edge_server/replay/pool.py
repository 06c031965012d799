"""Pool of training processes, or this process alone.

Batches are numbered and callers wait for a specific number, so results do not depend on the speed of the processes.
Processes are forked once per replay and share the data set's memory with this one.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Protocol, Self, TypeAlias

import msgspec
import torch

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.interface import Job
from shared.errors import FieldFleetError

MESSAGE_BYTES = 1 << 18
# Returned by recv when the other end of the socket is closed.
NOBODY = b""
# Batches queued per process, so that none runs dry while the parent handles messages.
AHEAD = 8


class TrainingOrder(msgspec.Struct, frozen=True):
    """Job and its cost on the device.

    Attributes:
        spent: Cost of the complete task.
        step: Cost of one step, for a task that measures.
    """

    job: Job
    spent: BlockCost
    step: BlockCost | None = None


Ending: TypeAlias = str | None
"""None for a completed job, else the cause of its failure."""

Execute: TypeAlias = Callable[[Sequence[TrainingOrder]], list[Ending]]


class Pool(Protocol):
    """Executor of order batches."""

    def submit_batch(self, number: int, orders: Sequence[TrainingOrder]) -> None:
        """Accept a batch; it may start at once."""
        ...

    def wait(self, number: int) -> list[Ending]:
        """Block until a batch is done and return the endings of its orders.

        Raises:
            FieldFleetError: The process that computed it has died.
        """
        ...

    def drop(self, number: int) -> None:
        """Discard a batch; after the return, no process works on it."""
        ...


class LocalPool:
    """Pool that executes batches in this process, when `wait` asks for them."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._batches: dict[int, Sequence[TrainingOrder]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def submit_batch(self, number: int, orders: Sequence[TrainingOrder]) -> None:
        self._batches[number] = orders

    def wait(self, number: int) -> list[Ending]:
        return self._execute(self._batches.pop(number))

    def drop(self, number: int) -> None:
        self._batches.pop(number, None)  # absent if Ctrl-C interrupted it


class ProcessPool:
    """Pool of forked processes that take batches from one socket and answer on another.

    Attributes:
        processes: All processes, alive or dead.
    """

    def __init__(self, execute: Execute, count: int) -> None:
        """Fork `count` processes; data that `execute` has loaded by now is shared."""
        self._orders, worker_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._endings, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._backlog: deque[tuple[int, Sequence[TrainingOrder]]] = deque()
        self._pending: set[int] = set()
        self._done: dict[int, list[Ending]] = {}
        context, parent_sockets = multiprocessing.get_context("fork"), (self._orders, self._endings)
        self.processes = [
            context.Process(target=_run_worker, args=(execute, worker_orders, answers, parent_sockets), daemon=True)
            for _ in range(count)
        ]
        for process in self.processes:
            process.start()
        for worker_socket in (worker_orders, answers):
            worker_socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate the processes, also during a batch."""
        for parent_socket in (self._orders, self._endings):
            parent_socket.close()
        for process in self.processes:
            process.terminate()
            process.join()
            process.close()

    def submit_batch(self, number: int, orders: Sequence[TrainingOrder]) -> None:
        self._backlog.append((number, orders))
        self._send_backlog()

    def wait(self, number: int) -> list[Ending]:
        while number not in self._done:
            self._receive_endings()
            self._send_backlog()
        return self._done.pop(number)

    def drop(self, number: int) -> None:
        batches = [batch for batch in self._backlog if batch[0] == number]
        for batch in batches:
            self._backlog.remove(batch)
        if not batches:
            self.wait(number)

    def _send_backlog(self) -> None:
        """Keep every process busy without filling the socket's buffer."""
        while self._backlog and len(self._pending) < AHEAD * len(self.processes):
            number, orders = self._backlog.popleft()
            with suppress(ConnectionError):  # all processes are dead; `wait` reports that
                self._orders.send(msgspec.msgpack.encode((number, orders)))
            self._pending.add(number)

    def _receive_endings(self) -> None:
        """Receive the endings of one batch.

        Raises:
            FieldFleetError: A process has died.
        """
        sentinels = [process.sentinel for process in self.processes]
        answered = self._endings in wait([self._endings, *sentinels])
        data = self._endings.recv(MESSAGE_BYTES) if answered else NOBODY
        if data == NOBODY:
            ended = wait(sentinels)
            dead = next(process for process in self.processes if process.sentinel in ended)
            dead.join()
            raise FieldFleetError(
                f"a process that trains for the replay ended with code {dead.exitcode}; -9 means killed, often for "
                "lack of memory: use fewer with --workers"
            )
        number, endings = msgspec.msgpack.decode(data, type=tuple[int, list[Ending]])
        self._pending.discard(number)
        self._done[number] = endings


def _run_worker(
    execute: Execute, orders: socket.socket, answers: socket.socket, parent_sockets: Sequence[socket.socket]
) -> None:
    """Execute batches until the parent closes its socket."""
    gc.freeze()  # a collection would copy the memory shared with the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    for parent_socket in parent_sockets:
        parent_socket.close()
    decoder = msgspec.msgpack.Decoder(tuple[int, list[TrainingOrder]])
    while data := orders.recv(MESSAGE_BYTES):
        number, batch = decoder.decode(data)
        try:
            answers.send(msgspec.msgpack.encode((number, execute(batch))))
        except BrokenPipeError:
            return


def make_pool(execute: Execute, workers: int) -> LocalPool | ProcessPool:
    """Return a pool of `workers` processes; for one worker, this process."""
    return LocalPool(execute) if workers <= 1 else ProcessPool(execute, workers)
