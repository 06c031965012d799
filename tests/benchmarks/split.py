"""Split step over a real broker against the same computation in one process.

Four agents with their trainers, an edge server and mosquitto on loopback train AlexNet for CIFAR at its first cut: for
each device and step 4.2 MB of features go up and as much gradient comes down. `split_alone` does the same steps, by the
same halves, in a loop. They take turns, and each turn is compared with the loop beside it. The server and the loop have
a torch thread a core; the trainers, which run beside one another, have one each. A step's seconds are those that each
device measured of its second session, computing and exchange, over its steps, as the run's journal has them: neither
the start nor the model's way there and back counts. CPU time is that of the second round, of which the model's way is a
small part: what lies below the first cut has few parameters.

Then one device behind a slow link, see `split_link`; then a replay. Cases: `loopback`, `link`, `replay`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from json import loads
from pathlib import Path

import psutil
import split_link
from fleet import Place
from measure import Figure, Row, told
from split_run import (
    CORES,
    DEVICES,
    QUICK,
    Size,
    Stepped,
    agent_keys,
    alone,
    carried,
    median_s,
    opened_and_closed,
    planned,
    script,
    server_keys,
    steps_s,
)

from edge_server.fleet.broker import run_private_broker
from edge_server.plan.plan import Plan

SIZE, TURNS, REPLAYED = Size(steps=12), 3, 3
QUICK_DEVICES = 2
SAMPLE_S, PATIENCE_S = 0.1, 1200.0
MOST_OVER = "<= 1.5"


async def live(folder: Path, plan: Plan, size: Size) -> Stepped:
    """Do a plan's rounds as processes over a private mosquitto."""
    async with AsyncExitStack() as stack:
        place = Place(folder, stack)
        broker = await stack.enter_async_context(run_private_broker(folder))
        reach: dict[str, object] = {"broker": {"port": broker.port}}
        pids: dict[str, list[int]] = {"broker": [broker.process.pid], "server": [], "agent": [], "trainer": []}
        pids["server"].append(await place.configured("server", "edge_server", server_keys(folder) | reach))
        for index in range(plan.cohort.min_devices):
            keys = agent_keys(folder, plan, index) | reach
            pids["agent"].append(await place.configured(f"device-{index}", "device_agent", keys))
        seen = await _until_ended(place, pids)
    opened, closed = opened_and_closed(folder)
    carried(folder, size.steps)
    (before, _), (after, memory) = (min(seen, key=lambda one, at=at: abs(one[0] - at))[1:] for at in (opened, closed))
    cpu_s = {kind: (after[kind] - before[kind]) / size.steps for kind in pids}
    return Stepped(steps_s(folder, size.steps), cpu_s, memory)


Seen = tuple[float, Counter[str], dict[str, int]]
"""A moment of the monotonic clock, and by kind of process the CPU seconds of all and the memory of one until then."""


async def _until_ended(place: Place, pids: Mapping[str, list[int]]) -> list[Seen]:
    """Return what was seen, again and again until the server has ended well."""
    seen = list[Seen]()
    async with asyncio.timeout(PATIENCE_S):
        while place.processes["server"].returncode is None:
            place.require_well()
            with suppress(psutil.Error):  # of a process that ends at this moment
                if len(pids["trainer"]) < len(pids["agent"]):
                    pids["trainer"][:] = [one.pid for pid in pids["agent"] for one in psutil.Process(pid).children()]
                memory = {kind: psutil.Process(own[0]).memory_info().rss for kind, own in pids.items() if own}
                seen.append((time.monotonic(), _cpu_s(pids), memory))
            await asyncio.sleep(SAMPLE_S)
    place.require_well()
    return seen


def _cpu_s(pids: Mapping[str, list[int]]) -> Counter[str]:
    found = Counter[str]()
    for kind, own in pids.items():
        found[kind] = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in own)
    return found


def on_loopback(*, quick: bool = False) -> list[Figure]:
    """Compare devices over a broker with the loop."""
    size, count = (QUICK, QUICK_DEVICES) if quick else (SIZE, DEVICES)
    ours, loop = list[Stepped](), list[Stepped]()
    for _ in range(1 if quick else TURNS):
        with tempfile.TemporaryDirectory(prefix="split-") as name:
            plan = planned(Path(name), size, count=count)
            loop.append(alone(Path(name), count, CORES))
            ours.append(asyncio.run(live(Path(name), plan, size)))
    over = statistics.median(median_s([one]) / median_s([bare]) for one, bare in zip(ours, loop, strict=True))
    total, bare = (statistics.median(sum(one.cpu_s.values()) for one in several) for several in (ours, loop))
    figures = [
        Figure(f"split step, {count} devices on loopback", median_s(ours), "s"),
        Figure(f"the same in one process, {CORES} threads", median_s(loop), "s"),
        Figure("split step over that", over, "x", MOST_OVER),
        Figure("split step, CPU of all processes", total, "s"),
        Figure("CPU of one process", bare, "s"),
        Figure("CPU of a split step over that", total / bare, "x"),
    ]
    for kind in ours[0].cpu_s:
        figures.append(Figure(f"split step, CPU: {kind}", statistics.median(one.cpu_s[kind] for one in ours), "s"))
        figures.append(Figure(f"split session, memory: {kind}", ours[-1].memory_bytes[kind] / 1e6, "MB"))
    figures.append(Figure("memory of one process", loop[-1].memory_bytes["alone"] / 1e6, "MB"))
    return figures


def in_replay(*, quick: bool = False) -> list[Figure]:
    """Compare a replay's rounds with the loop, on one thread each; only told."""
    size, count = (QUICK, QUICK_DEVICES) if quick else (SIZE, DEVICES)
    with tempfile.TemporaryDirectory(prefix="split-") as name:
        planned(Path(name), size, count=count, rounds=REPLAYED)
        round_s: list[float] = loads(script("replay_once.py", name, count, 1))
        loop_s = median_s([alone(Path(name), count, 1)])
    return [
        Figure("replay of a split session", count * size.steps / statistics.median(round_s), "device-steps/s"),
        Figure("the same in a loop, 1 thread", count / loop_s, "device-steps/s"),
    ]


CASES = {"loopback": on_loopback, "link": split_link.run, "replay": in_replay}


def run(wanted: list[str] | None = None, *, quick: bool = False) -> list[Row]:
    """Measure the cases named, or all."""
    return [figure for name in wanted or CASES for figure in CASES[name](quick=quick)]


def main() -> int:
    """Measure the cases that the command line names, or all; exit code 1 if a target is missed."""
    return told(run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
