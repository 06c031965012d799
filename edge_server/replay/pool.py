"""Who computes: this process, or several beside it that live as long as a replay.

Batches of orders are numbered; whoever gave a batch waits for its very number, so that how fast a process is decides
nothing. A process is forked once and shares the data set's memory with this one.
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

from device_agent.measurement.task_meter import Spent
from device_agent.trainer.interface import Job
from shared.errors import FieldFleetError

MESSAGE_BYTES = 1 << 18
NOBODY = b""
"""Is read from a socket at whose other end nobody is any more."""
AHEAD = 8
"""Batches that wait for each process: while this one is busy with messages, none of them runs dry."""


class TrainingOrder(msgspec.Struct, frozen=True):
    """A job, and what it costs its device.

    Attributes:
        spent: What the whole task costs.
        step: What one step of it costs; for a task that measures.
    """

    job: Job
    spent: Spent
    step: Spent | None = None


Ending: TypeAlias = str | None
"""None for a job that is done, else the cause for which it could not be."""

Execute: TypeAlias = Callable[[Sequence[TrainingOrder]], list[Ending]]


class Pool(Protocol):
    """Does batches of orders."""

    def submit_batch(self, number: int, orders: Sequence[TrainingOrder]) -> None:
        """Take a batch; it may be begun at once."""
        ...

    def wait(self, number: int) -> list[Ending]:
        """Block until a batch is done.

        Raises:
            FieldFleetError: The process that did it is dead.
        """
        ...

    def drop(self, number: int) -> None:
        """Return when nobody works at a batch any more; it need not have been done."""
        ...


class LocalPool:
    """This process, one batch after the other; a batch that is dropped is never begun."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._batches: dict[int, Sequence[TrainingOrder]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""

    def submit_batch(self, number: int, orders: Sequence[TrainingOrder]) -> None:
        self._batches[number] = orders

    def wait(self, number: int) -> list[Ending]:
        return self._execute(self._batches.pop(number))

    def drop(self, number: int) -> None:
        self._batches.pop(number, None)  # one that Ctrl-C has cut short is not there any more


class ProcessPool:
    """Processes that take whichever batch comes next from one socket, and answer on another.

    Attributes:
        processes: All of them, alive or not.
    """

    def __init__(self, execute: Execute, count: int) -> None:
        """Fork `count` processes; what `do` has read by now they need not read again."""
        self._orders, worker_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._endings, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._backlog: deque[tuple[int, Sequence[TrainingOrder]]] = deque()
        self._under_way: set[int] = set()
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
        """End the processes, whatever they are at."""
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
        """Keep every process busy, and the socket's buffer far from full."""
        while self._backlog and len(self._under_way) < AHEAD * len(self.processes):
            number, orders = self._backlog.popleft()
            with suppress(ConnectionError):  # all are dead, which whoever waits is told
                self._orders.send(msgspec.msgpack.encode((number, orders)))
            self._under_way.add(number)

    def _receive_endings(self) -> None:
        """Take one answer; a process that died gives none."""
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
        self._under_way.discard(number)
        self._done[number] = endings


def _run_worker(
    execute: Execute, orders: socket.socket, answers: socket.socket, parent_sockets: Sequence[socket.socket]
) -> None:
    """Do what comes until nobody can send any more."""
    gc.freeze()  # a collection would touch, and so copy, what is shared with whoever forked us
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever gives the orders decides
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
    """Return who computes: `workers` processes, or for one of them just this one."""
    return LocalPool(execute) if workers <= 1 else ProcessPool(execute, workers)
