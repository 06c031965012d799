"""Choice of the number of torch threads for a network, by timing its steps.

Steps are timed with 1, 2, 4, ... threads. More threads than a step has work for, or than there are idle processors,
make it slower; beside other busy processes hundreds of times slower if waiting threads spin, which `process.PASSIVE`
prevents. The number is stored on the board for each network. It is measured again after two tasks in a row whose steps
were more than 1.5 times as slow as before, or less than half as slow.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from shared.runtime.durable import replace_file

log = logging.getLogger("trainer")

FILE, MOST_BYTES, MAX_STORED = "threads.json", 1 << 16, 64
STEPS, LEAST_STEPS, ENOUGH_S = 7, 2, 0.5
"""Timed steps of a number of threads: so many, or fewer, once they have taken `ENOUGH_S`."""
GAIN = 1.03
"""A larger number of threads must be so much faster."""
SLOWER = 1.15
"""Where more threads take so much longer, still more are not tried."""
DRIFT, TASKS = 0.5, 2
"""Steps that differ by more than this share of the earlier seconds, in so many tasks in a row, are timed again."""


class ThreadChoice(msgspec.Struct, frozen=True):
    """Stored result for one network.

    Attributes:
        threads: Number of threads with the fastest steps.
        step_s: Median seconds of a step in the first task after the measurement; None before that task has ended.
    """

    threads: int
    step_s: float | None = None


def list_candidates(cpus: int) -> list[int]:
    """Return the numbers of threads to try: powers of two, and all processors."""
    return sorted({*(1 << power for power in range(cpus.bit_length())), cpus})


def find_fastest(counts: Sequence[int], seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """Return the number of threads with the fastest steps, the least of about equal ones, and the seconds of each.

    Args:
        counts: Numbers of threads to try, in ascending order.
        seconds: Times a step with a number of threads.
    """
    seconds_by_count = dict[int, float]()
    for count in counts:
        seconds_by_count[count] = seconds(count)
        if seconds_by_count[count] > SLOWER * min(seconds_by_count.values()):
            break
    best = min(seconds_by_count.values())
    return next(count for count in seconds_by_count if seconds_by_count[count] <= GAIN * best), seconds_by_count


@dataclass
class ThreadTuner:
    """Thread numbers of all networks that this trainer computes.

    Attributes:
        cpus: Number of processors that the process may use.
        apply: Sets the number of torch threads.
        clock: Monotonic clock in seconds.
    """

    cpus: int
    apply: Callable[[int], None]
    clock: Callable[[], float]
    _path: Path | None = None
    _choices: dict[str, ThreadChoice] = field(default_factory=dict)
    _key: str = ""
    _steps: list[float] = field(default_factory=list)
    _drifts: dict[str, int] = field(default_factory=dict)

    def use(self, states: Path, key: Sequence[object], step: Callable[[], None]) -> None:
        """Set the number of threads for a task, measuring it if needed.

        Args:
            key: Everything that a step's time depends on: network, batch shape, algorithm.
            step: Performs one step without side effects.
        """
        if self.cpus == 1:
            self.apply(1)
            return
        self._read(states / FILE)
        key_bytes = msgspec.json.encode([self.cpus, *map(str, key)])
        self._key, self._steps = hashlib.blake2b(key_bytes, digest_size=8).hexdigest(), []
        choice = self._choices.get(self._key)
        if choice is None or not 1 <= choice.threads <= self.cpus or self._drifts.get(self._key, 0) >= TASKS:
            step()  # warm-up: the first step loads code
            count, seconds = find_fastest(list_candidates(self.cpus), lambda threads: self._time(threads, step))
            timings = ", ".join(f"{1e3 * step_s:.3g} ms with {threads}" for threads, step_s in seconds.items())
            log.info("%d of %d threads: a step takes %s", count, self.cpus, timings)
            self._drifts.pop(self._key, None)
            self._store(ThreadChoice(count))
        self.apply(self._choices[self._key].threads)

    def note(self, seconds: float) -> None:
        """Record the seconds of one training step."""
        self._steps.append(seconds)

    def end_task(self) -> None:
        """Compare the steps of the task with the stored seconds, and count the tasks that differ."""
        steps, self._steps, choice = self._steps[1:], [], self._choices.get(self._key)  # the first step allocates
        if choice is None or len(steps) < LEAST_STEPS:
            return
        now = median(steps)
        if choice.step_s is None:
            self._store(ThreadChoice(choice.threads, now))
        elif abs(now - choice.step_s) > DRIFT * choice.step_s:
            self._drifts[self._key] = self._drifts.get(self._key, 0) + 1
        else:
            self._drifts.pop(self._key, None)

    def _time(self, threads: int, step: Callable[[], None]) -> float:
        """Return the median seconds of some steps; of slow ones one is enough."""
        self.apply(threads)
        first = self._seconds(step)
        if first > ENOUGH_S:
            return first
        took = [self._seconds(step) for _ in range(LEAST_STEPS)]  # without the first, which may allocate
        while len(took) < STEPS and sum(took) < ENOUGH_S:
            took.append(self._seconds(step))
        return median(took)

    def _seconds(self, step: Callable[[], None]) -> float:
        start = self.clock()
        step()
        return self.clock() - start

    def _store(self, choice: ThreadChoice) -> None:
        self._choices.pop(self._key, None)
        self._choices[self._key] = choice
        while len(self._choices) > MAX_STORED:
            del self._choices[next(iter(self._choices))]
        if self._path:
            try:
                replace_file(self._path, msgspec.json.encode(self._choices), durable=False)
            except OSError as error:
                log.warning("%s cannot be written (%s): threads are timed again by the next trainer", self._path, error)

    def _read(self, path: Path) -> None:
        """Read the choices of an earlier trainer; a damaged file is ignored and later overwritten."""
        if path == self._path:
            return
        self._path, self._choices = path, {}
        try:
            with path.open("rb") as file:
                self._choices = msgspec.json.decode(file.read(MOST_BYTES), type=dict[str, ThreadChoice])
        except (OSError, msgspec.MsgspecError):
            return
