"""Seconds of a training step with the number of threads that the trainer finds, against fixed numbers of threads.

Real trainer processes, of which each does tasks of the demo's network or of a larger one: alone, three at once, beside
two busy loops, and with half a processor. Turns of all settings are interleaved, so that a machine that is slow for a
while is slow for all.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cpu
from measure import Figure, NotRun, Row
from serving_beside import training_job

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from device_agent.trainer.threads import list_candidates
from shared.protocol.messages import Spec
from shared.runtime.cpus import count_usable_cpus

NETWORKS = {
    "the demo's network": (Spec(name="cnn", options={"side": 8, "width": 16, "hidden": 64}), 8),
    "a larger network": (Spec(name="cnn", options={"side": 8, "width": 64, "hidden": 512}), 2),
}
"""With the epochs of a task, each of 90 steps."""
STEPS_PER_EPOCH, TURNS, QUICK_TURNS, AT_ONCE, LOOPS, QUOTA = 90, 9, 1, 3, 2, 0.5
FOUND = 0
"""Threads of a trainer that finds the number itself."""


class Trainer:
    """A trainer process with a folder of its own."""

    def __init__(self, folder: Path, threads: int) -> None:
        folder.mkdir()
        self.folder, self.number = folder, 0
        self.process = TrainerProcess(folder / "lock", 600.0, TrainerOptions(0, threads))

    async def step_s(self, network: Spec, epochs: int) -> float:
        """Do a task; return the seconds of one of its steps."""
        self.number += 1
        await self.process(training_job(self.folder, self.number, epochs=epochs, network=network))
        entry = Outbox(self.folder / "outbox", self.folder / "state").entries()[-1]
        return entry.update.cost.compute_s / (epochs * STEPS_PER_EPOCH)


async def at_once(trainers: Sequence[Trainer], network: Spec, epochs: int) -> float:
    """Have trainers do a task each at the same time; return the median seconds of a step."""
    return statistics.median(await asyncio.gather(*(one.step_s(network, epochs) for one in trainers)))


async def measured(folder: Path, name: str, turns: int) -> list[Figure]:
    """Measure a network alone, several times at once, and beside busy loops."""
    network, epochs = NETWORKS[name]
    counts = [*list_candidates(count_usable_cpus()), FOUND]
    alone = {count: Trainer(folder / f"alone-{count}", count) for count in counts}
    several = [Trainer(folder / f"several-{number}", FOUND) for number in range(AT_ONCE)]
    beside = Trainer(folder / "beside", FOUND)
    seen: dict[object, list[float]] = {count: [] for count in (*counts, "several", "beside")}
    try:
        for turn in range(-1, turns):  # the first one loads torch, reads examples and finds the number
            for count, trainer in alone.items():
                seen[count].append(await trainer.step_s(network, epochs))
            seen["several"].append(await at_once(several, network, epochs))
            with cpu.looping(LOOPS):
                seen["beside"].append(await beside.step_s(network, epochs))
            if turn < 0:
                seen = {key: [] for key in seen}
    finally:
        for trainer in (*alone.values(), *several, beside):
            await trainer.process.close()
    step = {key: statistics.median(each) for key, each in seen.items()}
    best = min(step[count] for count in counts if count != FOUND)
    return [
        *(Figure(f"{name}, {count or 'the number found'}: a step", 1e3 * step[count], "ms") for count in counts),
        Figure(f"{name}, alone: against the best fixed number", step[FOUND] / best, "x", "<= 1.05"),
        Figure(f"{name}, {AT_ONCE} at once: against one", step["several"] / step[FOUND], "x", f"<= {AT_ONCE}"),
        Figure(f"{name}, beside {LOOPS} busy loops: against one thread alone", step["beside"] / step[1], "x", "<= 2"),
    ]


async def with_quota(folder: Path, turns: int) -> list[Figure]:
    """Measure the demo's network with half a processor."""
    network, epochs = NETWORKS["the demo's network"]
    counts = (1, 2, FOUND)
    with cpu.group() as place:
        place.limit(QUOTA)
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if _is_cpu(line))
        (place.folder / "cgroup.procs").write_text(str(os.getpid()))
        trainers = {count: Trainer(folder / f"quota-{count}", count) for count in counts}
        seen = {count: list[float]() for count in counts}
        try:
            for turn in range(-1, turns):
                for count, trainer in trainers.items():
                    seen[count].append(await trainer.step_s(network, epochs))
                if turn < 0:
                    seen = {count: [] for count in counts}
        finally:
            for trainer in trainers.values():
                await trainer.process.close()
            above = place.folder.parent / own.rpartition(":")[2].lstrip("/")
            (above / "cgroup.procs").write_text(str(os.getpid()))
    step = {count: statistics.median(each) for count, each in seen.items()}
    ratio = step[FOUND] / min(step[1], step[2])
    return [
        *(
            Figure(f"half a processor, {count or 'the number found'}: a step", 1e3 * step[count], "ms")
            for count in counts
        ),
        Figure(f"{QUOTA} CPUs: against the best of 1 and 2 threads", ratio, "x", "<= 1.2"),
    ]


def _is_cpu(line: str) -> bool:
    controllers = line.split(":")[1]
    return not controllers or "cpu" in controllers.split(",")


def run(*, quick: bool = False) -> list[Row]:
    """Measure all settings; quickly, the first network without a quota."""
    turns, rows = QUICK_TURNS if quick else TURNS, list[Row]()
    for name in list(NETWORKS)[: 1 if quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measured(Path(folder), name, turns))
    if quick:
        return rows
    if reason := cpu.lack():
        return [*rows, NotRun("half a processor", reason)]
    with tempfile.TemporaryDirectory() as folder:
        return [*rows, *asyncio.run(with_quota(Path(folder), turns))]
