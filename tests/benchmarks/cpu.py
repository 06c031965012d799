"""CPU cycles of a training step under control-group limits of 25, 50 and 100 %.

The seconds must grow as the limit says, the cycles must stay. Turns are interleaved, so that a machine that is slow for
a while is slow for all limits. As root; control groups of version 1, or of version 2 where the root delegates `cpu`.

The meter's CPU time is to be that of the scheduler's own account of its threads, and work which needs no memory (a hash
of 16 KiB, again and again) is to take as many cycles under every limit. So is a training step, that of
deploy/plans/demo.toml and that of a larger CNN, though a process that was stopped comes back to cold caches, branch
tables and page tables, and does take more: a quota of a quarter costs 8 to 16 % of the speed beyond the share wherever
it was tried. Each once with cores kept awake by loops of the lowest priority, and once as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from measure import Figure, NotRun, Row

LIMITS: tuple[float | None, ...] = (None, 1.0, 0.5, 0.25)
TURNS, WARM_STEPS = 12, 5
QUICK_TURNS, QUICK_SHARE = 2, 10
"""Of a quick run: so many turns, each of the steps divided by that."""
THREADS = 1
PERIOD_S = 0.1
MOST_OFF, SLACK = 0.05, 1.05
HASHED = bytes(16384)


@dataclass(frozen=True)
class Step:
    """A training step of the CNN on images of `side` by `side`, and how many make half a second of CPU time."""

    side: int
    batch: int
    steps: int


STEPS = {"a hash": Step(0, 800, 60), "the demo's step": Step(8, 16, 600), "a larger step": Step(28, 32, 60)}
"""Of a side of 0: no network, but `batch` hashes a step."""


@dataclass(frozen=True)
class Group:
    """A control group that takes processor time away."""

    folder: Path
    version: int

    def limit(self, share: float | None) -> None:
        """Let the group run so much of one core; None lifts the limit."""
        period_us = round(1e6 * PERIOD_S)
        if self.version == 1:
            (self.folder / "cpu.cfs_period_us").write_text(f"{period_us}")
            (self.folder / "cpu.cfs_quota_us").write_text(f"{-1 if share is None else round(share * period_us)}")
        else:
            quota = "max" if share is None else round(share * period_us)
            (self.folder / "cpu.max").write_text(f"{quota} {period_us}")


@contextmanager
def group(number: int = 0) -> Iterator[Group]:
    """Make a control group, one of several of this process, and remove it when the processes in it have ended."""
    name = f"fieldfleet-bench-{os.getpid()}-{number}"
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    made = Group(old / name, 1) if old.is_dir() else Group(new / name, 2)
    made.folder.mkdir()
    try:
        yield made
    finally:
        made.folder.rmdir()


def charged_s(pid: int) -> float:
    """Return the CPU seconds that the scheduler has charged to the threads of a process."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextmanager
def worker(place: Group, step: Step) -> Iterator[subprocess.Popen[str]]:
    """Start a process in the group that trains as many steps as it is told, and says what they took."""
    command = [sys.executable, __file__, str(step.side), str(step.batch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            (place.folder / "cgroup.procs").write_text(str(process.pid))
            yield process
        finally:
            place.limit(None)
            process.stdin.close()
            process.wait(timeout=60)


IDLE = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
"""Before a loop that runs where nobody else wants to."""


@contextmanager
def looping(count: int, before: str = "") -> Iterator[None]:
    """Run processes that do nothing but run, `count` of them, each after the code `before`."""
    loops = [subprocess.Popen([sys.executable, "-c", f"{before}while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(side: int, batch: int) -> None:
    """Be the worker: a real training step, set up and metered as the trainer does."""
    from shared.runtime import malloc  # noqa: PLC0415

    malloc.enable_huge_pages()
    import torch  # noqa: PLC0415 - the measuring process has no need of it
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    from device_agent.measurement.cpu_cycles import CycleCounter  # noqa: PLC0415
    from device_agent.measurement.task_meter import ProcessMeter  # noqa: PLC0415
    from device_agent.profile.load import load_for_board  # noqa: PLC0415
    from shared.models.cnn import cnn  # noqa: PLC0415

    torch.set_num_threads(THREADS)
    network = cnn(side=side or 8).layers
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    inputs, labels = torch.rand(batch, 1, side or 8, side or 8), torch.arange(batch) % 10

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()

    def hashing() -> None:
        for _ in range(batch):
            hashlib.sha256(HASHED).digest()

    work = step if side else hashing
    meter = ProcessMeter(cycles=CycleCounter(Path("/"), load_for_board(Path("/"))))
    for line in sys.stdin:
        with meter.task() as spent:
            for _ in range(int(line)):
                work()
        said = {"wall_s": spent.compute_s, "cpu_s": spent.cpu_s, "cycles": spent.cycles, "mean_hertz": spent.mean_hertz}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def ask(process: subprocess.Popen[str], steps: int) -> dict[str, float]:
    """Let the worker train, and return what it took."""
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def lack() -> str:
    """Return why no process can be limited here; empty where one can."""
    if os.geteuid():
        return "control groups need root"
    try:
        with group() as place:
            place.limit(0.5)
            return ""
    except OSError as error:
        return f"no control group that limits processor time can be made here: {error}"


def run(*, quick: bool = False) -> list[Row]:
    """Measure both steps under all limits in turn, several times; with cores kept awake, and as they are."""
    if reason := lack():
        return [NotRun("cpu", reason)]
    if not quick:
        return measured(STEPS, TURNS)
    return measured({name: replace(step, steps=step.steps // QUICK_SHARE) for name, step in STEPS.items()}, QUICK_TURNS)


def measured(steps: Mapping[str, Step], turns: int) -> list[Row]:
    """Measure steps of a few kinds in so many turns."""
    figures: list[Row] = []
    for name, step in steps.items():
        with group() as place, worker(place, step) as process:
            ask(process, WARM_STEPS)
            for are_awake in (True, False):
                seen: dict[float | None, list[dict[str, float]]] = {limit: [] for limit in LIMITS}
                with looping(os.cpu_count() or 1, IDLE) if are_awake else nullcontext():
                    for turn in range(turns):
                        for limit in LIMITS[turn % len(LIMITS) :] + LIMITS[: turn % len(LIMITS)]:
                            place.limit(limit)
                            before_s = charged_s(process.pid)
                            said = ask(process, step.steps)
                            seen[limit].append(said | {"charged_s": charged_s(process.pid) - before_s})
                if any(one["cycles"] is None for one in seen[None]):
                    return [NotRun("cpu", "the clocks of this machine's processors are unknown")]
                figures += compared(name if not are_awake else f"{name}, cores kept awake", step.steps, seen)
    return figures


def compared(name: str, steps: int, seen: dict[float | None, list[dict[str, float]]]) -> list[Figure]:
    """Return how far the limited turns are from the free ones beside them."""
    free = {key: statistics.median(one[key] for one in seen[None]) for key in ("wall_s", "cycles")}
    lower, _, upper = statistics.quantiles((one["cycles"] for one in seen[None]), n=4)
    figures = [
        Figure(f"cycles of {name}, no limit", free["cycles"] / steps / 1e6, "million"),
        Figure("mean clock", statistics.median(one["mean_hertz"] for one in seen[None]) / 1e6, "MHz"),
        Figure("half of its turns lie within", 100 * (upper - lower) / free["cycles"], "%"),
    ]
    for limit in LIMITS[1:]:
        off = [one["cycles"] / alone["cycles"] - 1 for one, alone in zip(seen[limit], seen[None], strict=True)]
        wall_s = statistics.median(one["wall_s"] for one in seen[limit])
        used = sum(one["cpu_s"] for one in seen[limit]) / sum(one["wall_s"] for one in seen[limit])
        said = f"limit {limit:.0%}: {name}"
        told = statistics.median(one["cpu_s"] / one["charged_s"] for one in seen[limit]) - 1
        most_used = SLACK * limit * (1 + PERIOD_S / wall_s)  # a turn begins with a period's share in hand
        figures += [
            Figure(f"cycles off, {said}", 100 * abs(statistics.median(off)), "%", f"<= {100 * MOST_OFF:g}"),
            Figure(f"CPU time off the scheduler's account, {said}", 100 * abs(told), "%", f"<= {100 * MOST_OFF:g}"),
            Figure(f"cores used, {said}", used, "", f"<= {most_used:.3g}"),
            Figure(f"seconds over no limit, {said}", wall_s / free["wall_s"], "x"),
        ]
    return figures


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]))
