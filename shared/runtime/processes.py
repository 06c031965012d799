"""A process and its children: its start, its log, and the end of those it started.

A log is one line an event on standard error: level, logger, key=value; under systemd the journal adds the time.
Children are ended by SIGTERM or by what they were told, and by SIGKILL where that does not help in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Iterator

from shared.runtime import backports
from shared.runtime.logs import JournalLines, LimitRepeats, writes_to_journal

EXIT_PATIENCE_S = 5.0
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""
HEAVY = "torch"

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

EXIT_THREAD = 71
"""Of a process in which a thread has failed."""


async def terminate(process: Process, patience_s: float = EXIT_PATIENCE_S) -> None:
    """End a child process that was started here: politely, then not; return when it is gone."""
    if process.returncode is None:
        _send(process, signal.SIGTERM)
        await wait_or_kill(process, patience_s)


async def wait_or_kill(process: Process, patience_s: float = EXIT_PATIENCE_S) -> None:
    """Wait for the end of a process that was told to end, for instance by closing its input; kill it if it does not."""
    try:
        async with backports.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def kill(process: Process) -> None:
    """End a process as a power cut does; return when it is gone."""
    if process.returncode is None:
        _send(process, signal.SIGKILL)
        await process.wait()


def _send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a child that asyncio has not told the end of.

    Not by the child's own method: that looks first whether it has ended, and takes the exit status away from asyncio,
    which then tells 255 of a process that a signal killed (CPython, `Popen.send_signal`).
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def configure(level: str, more: int = 0) -> None:
    """Set up logging for a process.

    Args:
        level: Name of a level: debug, info, warning, error.
        more: By how many levels more is logged.
    """
    if (usual := LEVELS.get(level.lower())) is None:
        raise ValueError(f"no level {level.upper()!r}: use debug, info, warning or error")
    asked = max(logging.DEBUG, usual - more * (logging.WARNING - logging.INFO))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JournalLines() if writes_to_journal() else _stamped_lines())
    handler.addFilter(LimitRepeats())
    logging.basicConfig(level=asked, handlers=[handler], force=True)
    logging.getLogger("mqtt").setLevel(logging.ERROR)  # its reconnects are told by our own transport, once a state


def _stamped_lines() -> logging.Formatter:
    line = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s"
    formatter = logging.Formatter(line, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime  # noqa: TID251 - only converts what the record holds
    return formatter


def end_on_thread_failure() -> None:
    """End this process, with a traceback, at an error that a thread does not handle.

    By default only the thread ends, and what waits for it waits for ever.
    """

    def end(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_type is SystemExit:
            return
        what = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
        name = failed.thread.name if failed.thread else "unknown"
        logging.getLogger("process").critical("thread %r failed; ending", name, exc_info=what)
        logging.shutdown()
        os._exit(EXIT_THREAD)  # from a thread nothing less would; the main thread may be deep in a library

    threading.excepthook = end


def keep_private() -> None:
    """Have what this process writes from now on be for its user alone: updates, states and models are nobody else's."""
    os.umask(0o077)


def die_with_parent(pipe: int | None = None) -> None:
    """Have the system kill this process when the one that started it is gone, however busy it is then.

    To the system that is the thread that started it: an event loop on a main thread lives as long as its process.

    Args:
        pipe: Descriptor of a pipe whose other end that one alone has: where it is gone already, this process ends now.
    """
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if pipe is not None:
        look = select.poll()
        look.register(pipe, 0)
        if look.poll(0):
            sys.exit(0)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import heavy modules in the block: nothing is collected meanwhile, nor ever looked for among what they made.

    Importing torch makes half a million objects that stay. The collector goes through them again and again while they
    come, and once more at the end of the process: a third of the CPU seconds of a start, which a board counts in tens.
    Where torch is loaded already, or collecting is off, nothing changes: what lives then may become garbage.
    """
    if HEAVY in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if HEAVY in sys.modules:
            gc.freeze()
        gc.enable()
