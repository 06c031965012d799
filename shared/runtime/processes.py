"""Start, log and terminate processes.

A log has one line per event on standard error: level, logger, key=value; under systemd the journal adds the time.
Child processes get SIGTERM or another request to end, and SIGKILL after a timeout.
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
from shared.runtime.logs import JournalLines, RepeatFilter, writes_to_journal

EXIT_PATIENCE_S = 5.0
PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""
HEAVY = "torch"

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

EXIT_THREAD = 71
"""Exit code of a process in which a thread has failed."""


async def terminate(process: Process, patience_s: float = EXIT_PATIENCE_S) -> None:
    """Terminate a child process with SIGTERM, then SIGKILL; return when it has ended."""
    if process.returncode is None:
        _send(process, signal.SIGTERM)
        await wait_or_kill(process, patience_s)


async def wait_or_kill(process: Process, patience_s: float = EXIT_PATIENCE_S) -> None:
    """Wait for a process that was asked to end, for instance by closing its input; kill it after a timeout."""
    try:
        async with backports.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def kill(process: Process) -> None:
    """Kill a process and wait for its end."""
    if process.returncode is None:
        _send(process, signal.SIGKILL)
        await process.wait()


def _send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a child whose end asyncio has not noticed.

    `Popen.send_signal` would first poll the child and take the exit status away from asyncio, which then reports 255
    for a process that a signal killed.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def configure(level: str, more: int = 0) -> None:
    """Configure logging for a process.

    Args:
        more: Number of levels by which to log more.
    """
    if (usual := LEVELS.get(level.lower())) is None:
        raise ValueError(f"log level {level.upper()!r} does not exist: use debug, info, warning or error")
    threshold = max(logging.DEBUG, usual - more * (logging.WARNING - logging.INFO))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JournalLines() if writes_to_journal() else _stamped_lines())
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=threshold, handlers=[handler], force=True)
    logging.getLogger("mqtt").setLevel(logging.ERROR)  # our own transport logs its reconnects, once per state


def _stamped_lines() -> logging.Formatter:
    line = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s"
    formatter = logging.Formatter(line, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime  # noqa: TID251 - only converts the record's time
    return formatter


def end_on_thread_failure() -> None:
    """End this process, with a traceback, if a thread fails.

    By default only the thread ends, and whatever waits for it waits for ever.
    """

    def end(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_type is SystemExit:
            return
        what = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
        name = failed.thread.name if failed.thread else "unknown"
        logging.getLogger("process").critical("thread %r failed; ending", name, exc_info=what)
        logging.shutdown()
        os._exit(EXIT_THREAD)  # a thread cannot raise SystemExit in the main thread, which may be deep in a library

    threading.excepthook = end


def keep_private() -> None:
    """Restrict files that this process creates to its user: updates, states and models are private."""
    os.umask(0o077)


def die_with_parent(pipe: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, however busy it is then.

    The kernel watches the parent's thread; an event loop on a main thread lives as long as its process.

    Args:
        pipe: Descriptor of a pipe whose other end only the parent has: if that is closed already, exit now.
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
    """Import heavy modules in the block with the garbage collector off, then exempt their objects from collection.

    Importing torch makes half a million permanent objects. The collector scans them again and again during the import,
    and once more at exit: a third of the CPU seconds of a start, which a board counts in tens. No effect if torch is
    loaded already or collection is off, since existing objects may become garbage.
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
