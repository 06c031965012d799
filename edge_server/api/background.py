"""Run blocking work in a thread, also from a running event loop.

The work runs in a thread. The calling thread receives its events, so that a callback of the caller runs where the
caller is, and Ctrl-C reaches the caller, which then stops the work. Whatever the work changes of the process's global
state is restored: torch's threads, random generators, the umask.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shared.runtime.processes import keep_private
from shared.tensors.generators import generator_states, set_generator_states

T = TypeVar("T")
Event = TypeVar("Event")


class Stop:
    """Request from another thread to cancel a coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._cancel: Callable[[], object] | None = None

    def request(self) -> None:
        """Cancel the watched coroutine, or the next one."""
        with self._lock:
            self._requested = True
            if self._cancel:
                self._cancel()

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the running task, which `request` cancels."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._requested:
                work.close()
                raise asyncio.CancelledError
        try:
            return await work
        finally:
            with self._lock:
                self._cancel = None


class Background(Generic[Event, T]):
    """Work in a thread, with its events for the calling thread."""

    def __init__(self, work: Callable[[Stop, Callable[[Event], None]], T]) -> None:
        """Prepare the work.

        Args:
            work: Gets the stop to obey and the function that passes an event on.
        """
        self._work, self._stop, self._result = work, Stop(), Future[T]()
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()

    def run(self, hear: Callable[[Event], None]) -> T:
        """Do the work and return its result; on any exception in this thread, stop the work first.

        Args:
            hear: Called in this thread with every event.
        """
        thread = threading.Thread(target=contextvars.copy_context().run, args=(self._go,), name="fieldfleet")
        thread.start()
        try:
            while event := self._events.get():
                hear(event[0])
        except BaseException:
            self._stop.request()
            raise
        finally:
            thread.join()
        return self._result.result()

    def _go(self) -> None:
        try:
            with unchanged_process():
                self._result.set_result(self._work(self._stop, lambda event: self._events.put([event])))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self._result.set_exception(error)
        finally:
            self._events.put([])


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore the process's global state after the block, in which new files are private."""
    threads, torch_states = torch.get_num_threads(), generator_states()
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002 - the global one
    umask = os.umask(0)
    keep_private()
    try:
        yield
    finally:
        os.umask(umask)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        set_generator_states(torch_states)
        torch.set_num_threads(threads)
