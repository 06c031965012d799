"""A step of a split session over a real broker against the same computation in one process without any network.

Four agents with their trainers, an edge server and mosquitto on loopback train AlexNet for CIFAR at its first cut: for
each device and step 4.2 MB of features go up and as much gradient comes down. `split_alone` does the same steps, by the
same halves, in a loop. They take turns, and each turn is compared with the loop beside it. The server and the loop have
a torch thread a core; the trainers, which run beside one another, have one each. A step lasts from barrier to barrier,
as the server's debug log says: neither the start nor the model's way there and back counts.

Then one device behind a slow link, see `split_link`; then a replay. Cases: `loopback`, `link`, `replay`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from json import loads
from pathlib import Path

import psutil
import split_link
from fleet import Place, until
from measure import Figure
from split_run import (
    CORES,
    DEVICES,
    WARM,
    Stepped,
    agent_keys,
    alone,
    barriers,
    carried,
    median_s,
    planned,
    script,
    server_keys,
    steps_s,
)

from edge_server.fleet.broker import running
from edge_server.plan.plan import Plan

STEPS, TURNS, ROUNDS = 12, 3, 3
MOST_OVER = "<= 1.5"


async def live(folder: Path, plan: Plan) -> Stepped:
    """Do a plan's round as processes over a private mosquitto."""
    async with AsyncExitStack() as stack:
        place = Place(folder, stack)
        broker = await stack.enter_async_context(running(folder))
        reach: dict[str, object] = {"broker": {"port": broker.port}}
        pids: dict[str, list[int]] = {"broker": [broker.process.pid], "server": [], "agent": [], "trainer": []}
        pids["server"].append(await place.configured("server", "edge_server", server_keys(folder) | reach))
        for index in range(DEVICES):
            keys = agent_keys(folder, plan, index) | reach
            pids["agent"].append(await place.configured(f"device-{index}", "device_agent", keys))
        await until(lambda: len(barriers(place.log("server"))) > WARM)
        pids["trainer"] += [child.pid for pid in pids["agent"] for child in psutil.Process(pid).children()]
        began, before = len(barriers(place.log("server"))), _cpu_s(pids)
        await until(lambda: len(barriers(place.log("server"))) >= STEPS)
        after, memory = _cpu_s(pids), {kind: psutil.Process(own[0]).memory_info().rss for kind, own in pids.items()}
        await until(lambda: "round=1/1" in place.log("server"))
    carried(folder, STEPS)
    cpu_s = {kind: (after[kind] - before[kind]) / (STEPS - began) for kind in pids}
    return Stepped(steps_s(place.log("server")), cpu_s, memory)


def _cpu_s(pids: Mapping[str, list[int]]) -> Counter[str]:
    found = Counter[str]()
    for kind, own in pids.items():
        found[kind] = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in own)
    return found


def on_loopback() -> list[Figure]:
    """Compare four devices over a broker with the loop."""
    ours, loop = list[Stepped](), list[Stepped]()
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory(prefix="split-") as name:
            plan = planned(Path(name), steps=STEPS)
            loop.append(alone(Path(name), DEVICES, CORES))
            ours.append(asyncio.run(live(Path(name), plan)))
    over = statistics.median(median_s([one]) / median_s([bare]) for one, bare in zip(ours, loop, strict=True))
    total, bare = (statistics.median(sum(one.cpu_s.values()) for one in several) for several in (ours, loop))
    figures = [
        Figure(f"split step, {DEVICES} devices on loopback", median_s(ours), "s"),
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


def in_replay() -> list[Figure]:
    """Compare a replay's rounds with the loop, on one thread each; only told."""
    with tempfile.TemporaryDirectory(prefix="split-") as name:
        planned(Path(name), steps=STEPS, rounds=ROUNDS)
        round_s: list[float] = loads(script("replay_once.py", name, DEVICES, 1))
        loop_s = median_s([alone(Path(name), DEVICES, 1)])
    return [
        Figure("replay of a split session", DEVICES * STEPS / statistics.median(round_s), "device-steps/s"),
        Figure("the same in a loop, 1 thread", DEVICES / loop_s, "device-steps/s"),
    ]


CASES = {"loopback": on_loopback, "link": split_link.run, "replay": in_replay}


def run(wanted: list[str] | None = None) -> list[Figure]:
    """Measure the cases named, or all."""
    return [figure for name in wanted or CASES for figure in CASES[name]()]


def main() -> int:
    """Measure the cases that the command line names, or all; exit code 1 if a target is missed."""
    figures = run(sys.argv[1:])
    for one in figures:
        sys.stdout.write(f"{one.name}: {one.value:.4g} {one.unit} {one.target} {'' if one.ok else 'MISSED'}\n")
    return 0 if all(one.ok for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
