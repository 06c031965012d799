"""Time limit for ONNX Runtime runs, since a graph may loop without end.

One thread per process watches all runs. ONNX Runtime checks for termination between two nodes, also inside a loop's
body.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ServingRefused

log = logging.getLogger(__name__)

MOST_RUN_S = 60.0
"""Far above the run time of any model that a device serves."""
LOOK_S = 0.5


class _Watch:
    """Terminates runs that exceed the limit."""

    def __init__(self) -> None:
        self.runs: dict[int, tuple[float, Any]] = {}
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._look, name="bounded runs", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            for latest, options in list(self.runs.values()):
                if now > latest:
                    options.terminate = True


_watch: _Watch | None = None
_start_lock = threading.Lock()


def _get_watch() -> _Watch:
    global _watch  # noqa: PLW0603 - one thread per process, started with the first run
    if _watch is None or not _watch.thread.is_alive():  # a fork has no threads
        with _start_lock:
            if _watch is None or not _watch.thread.is_alive():
                _watch = _Watch()
    return _watch


def bounded_run(session: Any, outputs: Sequence[str], inputs: Mapping[str, Any], what: str) -> list[Any]:
    """Run a session, and terminate the run after `MOST_RUN_S`.

    Args:
        outputs: Names of the outputs to compute.
        what: Name for the log line and the error, such as `release digits/3`.

    Raises:
        ServingRefused: The limit was exceeded.
    """
    from onnxruntime import RunOptions  # noqa: PLC0415 - its import takes a third of a second

    options, runs = RunOptions(), _get_watch().runs
    began = time.monotonic()
    runs[id(options)] = began + MOST_RUN_S, options
    try:
        results: list[Any] = session.run(list(outputs), dict(inputs), options)
    except Exception as error:
        if not options.terminate:
            raise
        seconds = time.monotonic() - began
        log.warning("%s: run terminated after %.0f s: its graph may loop without end", what, seconds)
        raise ServingRefused(f"{what} was terminated after {seconds:.0f} s: its graph may loop without end") from error
    finally:
        del runs[id(options)]
    return results
