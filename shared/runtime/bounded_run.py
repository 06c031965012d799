"""Runs of ONNX Runtime that end after a time: a graph may hold a loop without an end, for all inputs or for some.

A thread of the process looks at the runs that are under way, so that a run costs no thread of its own. ONNX Runtime
heeds the wish between two nodes, also of a loop's body.
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
"""No model that a board serves takes so long for a batch."""
LOOK_S = 0.5


class _Watch:
    """Ends runs that have taken too long."""

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
_starting = threading.Lock()


def _watching() -> _Watch:
    global _watch  # noqa: PLW0603 - one thread a process, begun with the first run
    if _watch is None or not _watch.thread.is_alive():  # a fork has no threads
        with _starting:
            if _watch is None or not _watch.thread.is_alive():
                _watch = _Watch()
    return _watch


def bounded_run(session: Any, outputs: Sequence[str], inputs: Mapping[str, Any], what: str) -> list[Any]:
    """Run a session, and end the run if it takes longer than `MOST_RUN_S`.

    Args:
        session: `onnxruntime.InferenceSession`.
        outputs: Names of those that are wanted.
        what: For the log line and the error, such as `release digits/3`.

    Raises:
        ServingRefused: It took longer.
    """
    from onnxruntime import RunOptions  # noqa: PLC0415 - its import takes a third of a second

    options, runs = RunOptions(), _watching().runs
    began = time.monotonic()
    runs[id(options)] = began + MOST_RUN_S, options
    try:
        found: list[Any] = session.run(list(outputs), dict(inputs), options)
    except Exception as error:
        if not options.terminate:
            raise
        seconds = time.monotonic() - began
        log.warning("%s: a run was ended after %.0f s: its graph may hold a loop without an end", what, seconds)
        raise ServingRefused(
            f"{what} ran for {seconds:.0f} s and was ended: its graph may hold a loop without an end"
        ) from error
    finally:
        del runs[id(options)]
    return found
