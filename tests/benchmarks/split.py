"""A step of a split session over a real broker against the same computation in one process without any network.

Four agents with their trainers, an edge server and mosquitto on loopback train AlexNet for CIFAR at its first cut: 4.2 MB
of features up and as much gradient down, for each device at each step. `split_alone` does the same steps, by the same
halves, in a loop. They take turns. The server and the loop have a torch thread a core; the trainers, which run beside
one another, have one each. A step lasts from barrier to barrier, as the server's debug log says: neither the start nor
the model's way there and back counts.

Then one device behind a link of 5 Mbit/s each way, whose payload gets 95.6 % of that, as root; then a replay.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec
import netns
import numpy as np
import psutil
from fleet import Place, until
from measure import Figure
from resume import Site

from edge_server.broker import running
from edge_server.store.base import UpdateAccepted, closed_rounds
from edge_server.store.sqlite import read
from edge_server.trial.plan import Plan, devices, load, share

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CIFAR = ROOT / os.environ.get("FIELDFLEET_DATA", "../shared/data") / "cifar10" / "cifar10_20k.npz"
CORES = os.cpu_count() or 1
DEVICES, BATCH, STEPS, WARM, TURNS = 4, 64, 14, 2, 3
MBIT, SHAPED_STEPS = 5, 6
ROUNDS, MOST_OVER, MOST_OFF = 3, "<= 1.5", "<= 15"
BARRIER = re.compile(r"^(\S+)Z DEBUG edge_server.splitting phase step ", re.MULTILINE)
PLAN = f"""
name = "split"
rounds = {{rounds}}
[algorithm]
name = "splitfed"
options = {{{{ period = {{steps}} }}}}
[model]
name = "alexnet"
[hyper]
batch_size = {BATCH}
learning_rate = 0.01
[cohort]
min_devices = {{count}}
[round]
deadline_s = 3600.0
step_deadline_s = 600.0
[evaluation]
every = 0
[partition]
kind = "even"
[data]
source = "npz"
path = "{{data}}"
mean = [0.49, 0.48, 0.45]
std = [0.25, 0.24, 0.26]
limit = {{examples}}
"""


@dataclass(frozen=True)
class Stepped:
    """What the steps of a session took.

    Attributes:
        step_s: Seconds of each, but for the first ones.
        cpu_s: Processor seconds a step, by kind of process.
        memory_bytes: Resident memory in the session, by kind of process; of one of each.
    """

    step_s: list[float]
    cpu_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]


def planned(folder: Path, *, steps: int, count: int = DEVICES, rounds: int = 1) -> Plan:
    """Write a plan, and random pictures of CIFAR-10's shape where that is not here; return the plan."""
    data = CIFAR.resolve()
    if not data.exists():
        data, draw = folder / "random.npz", np.random.default_rng(0)
        inputs = draw.integers(0, 256, (2 * DEVICES * BATCH, 32, 32, 3), np.uint8)
        labels = draw.integers(0, 10, len(inputs))
        np.savez(data, x_train=inputs, y_train=labels, x_test=inputs[:10], y_test=labels[:10])
    path = folder / "plan.toml"
    path.write_text(PLAN.format(rounds=rounds, steps=steps, count=count, data=data, examples=2 * count * BATCH))
    return load(path, folder)


def alone(folder: Path, count: int, threads: int) -> Stepped:
    """Do the steps of a folder's plan in a process of its own."""
    command = [sys.executable, HERE / "split_alone.py", folder / "plan.toml", count, threads]
    said = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    taken, cpu_s, memory = json.loads(said)
    return Stepped(taken[WARM:], {"alone": cpu_s}, {"alone": memory})


async def live(folder: Path, plan: Plan) -> Stepped:
    """Do the same as processes over a private mosquitto."""
    async with AsyncExitStack() as stack:
        place = Place(folder, stack)
        broker = await stack.enter_async_context(running(folder))
        common = {"broker": {"port": broker.port}}
        server = {"plan": "plan.toml", "run": "run", "data_dir": str(folder), "log_level": "debug", "threads": CORES}
        pids = {"broker": [broker.process.pid], "server": [], "agent": [], "trainer": []}
        pids["server"].append(await place.configured("server", "edge_server", server | common))
        fleet = devices(plan, DEVICES)
        for index, device in enumerate(fleet):
            config = _agent(folder, device.name, plan, index) | common
            pids["agent"].append(await place.configured(device.name, "device_agent", config))
        await until(lambda: len(_barriers(place.log("server"))) > WARM)
        pids["trainer"] += [child.pid for pid in pids["agent"] for child in psutil.Process(pid).children()]
        began, before = len(_barriers(place.log("server"))), _cpu_s(pids)
        await until(lambda: len(_barriers(place.log("server"))) >= STEPS)
        after, memory = _cpu_s(pids), {kind: psutil.Process(own[0]).memory_info().rss for kind, own in pids.items()}
        await until(lambda: "round=1/1" in place.log("server"))
        _carried(folder, STEPS)
        cpu_s = {kind: (after[kind] - before[kind]) / (STEPS - began) for kind in pids}
        return Stepped(_steps(place.log("server")), cpu_s, memory)


def _agent(folder: Path, name: str, plan: Plan, index: int) -> dict[str, object]:
    data = share(plan, devices(plan, plan.cohort.min_devices), index)
    threads = {"threads": 1}
    return {"device": name, "state_dir": str(folder / name), "data": msgspec.to_builtins(data), "trainer": threads}


def _cpu_s(pids: Mapping[str, list[int]]) -> Counter[str]:
    found = Counter[str]()
    for kind, own in pids.items():
        found[kind] = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in own)
    return found


def _barriers(log: str) -> list[float]:
    return [datetime.fromisoformat(stamp).timestamp() for stamp in BARRIER.findall(log)]


def _steps(log: str) -> list[float]:
    return [later - earlier for earlier, later in pairwise(_barriers(log))][WARM:]


def _carried(folder: Path, steps: int) -> tuple[float, float]:
    """Return the bytes of frames of one device's step, up and down; refuse a run whose steps were not all whole."""
    records = read(folder / "run")
    if any(one.steps != steps or one.missed or one.refused for one in closed_rounds(records)):
        raise RuntimeError(f"steps were missed or refused: {closed_rounds(records)}")
    costs = [one.update.cost for one in records if isinstance(one, UpdateAccepted)]
    ways = [[one.features_bytes for one in costs], [one.gradient_bytes for one in costs]]
    up, down = (sum(one or 0 for one in way) / len(way) / steps for way in ways)
    return up, down


class Shaped(Site):
    """A site whose one board is behind a slow link."""

    def _server(self) -> list[str]:
        keys = {"plan": "plan.toml", "run": "run", "data_dir": str(self.folder), "log_level": "debug", "threads": CORES}
        return self._ours("edge_server", "server", keys, self.port)

    def _agent(self, port: int) -> list[str]:
        plan = load(self.folder / "plan.toml", self.folder)
        return [*self.prefix, *self._ours("device_agent", "agent", _agent(self.folder, "device-0", plan, 0), port)]

    def log(self) -> str:
        """Return what the server wrote so far."""
        return (self.folder / "server.log").read_text()


async def shaped(folder: Path) -> tuple[list[float], tuple[float, float]]:
    """Return the seconds of one device's steps behind a slow link, and the bytes of a step, up and down."""
    with netns.slow_link(f"{MBIT}mbit") as link:
        here = Shaped(folder, 20_000 + os.getpid() % 20_000, link.address, link.prefix)
        try:
            for name in ("broker", "server", "agent"):
                await here.start(name, here.port)
                await asyncio.sleep(0.3)
            await until(lambda: "round=1/1" in here.log(), 900.0)
            return _steps(here.log()), _carried(folder, SHAPED_STEPS)
        finally:
            await here.close()


def replayed(folder: Path) -> list[float]:
    """Return the seconds of a replay's rounds, but for the first."""
    command = [sys.executable, HERE / "replay_once.py", folder, DEVICES, 1]
    said = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    found: list[float] = json.loads(said.splitlines()[-1])
    return found


def on_loopback() -> list[Figure]:
    """Compare four devices over a broker with the loop."""
    ours, loop = list[Stepped](), list[Stepped]()
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory(prefix="split-") as name:
            plan = planned(Path(name), steps=STEPS)
            loop.append(alone(Path(name), DEVICES, CORES))
            ours.append(asyncio.run(live(Path(name), plan)))
    step_s, loop_s = _median(ours), _median(loop)
    figures = [Figure("split step, four devices on loopback", step_s, "s")]
    figures.append(Figure(f"the same in one process, {CORES} threads", loop_s, "s"))
    figures.append(Figure("split step over that", step_s / loop_s, "x", MOST_OVER))
    for kind in ours[0].cpu_s:
        figures.append(Figure(f"CPU a step, {kind}", statistics.median(one.cpu_s[kind] for one in ours), "s"))
        figures.append(Figure(f"memory, {kind}", ours[-1].memory_bytes[kind] / 1e6, "MB"))
    total, bare = (statistics.median(sum(one.cpu_s.values()) for one in several) for several in (ours, loop))
    figures.append(Figure("CPU a step, one process", bare, "s"))
    figures.append(Figure("CPU of a split step over that", total / bare, "x"))
    return figures


def _median(several: list[Stepped]) -> float:
    return statistics.median(second for one in several for second in one.step_s)


def behind_a_link() -> list[Figure]:
    """Compare a step of one device behind a slow link with its bytes at that rate and its computation."""
    if os.geteuid():
        sys.stderr.write("split: network namespaces need root\n")
        return []
    with tempfile.TemporaryDirectory(prefix="split-") as name:
        planned(Path(name), steps=SHAPED_STEPS, count=1)
        taken, (up, down) = asyncio.run(shaped(Path(name)))
        compute_s = _median([alone(Path(name), 1, CORES)])
    step_s, ideal_s = statistics.median(taken), (up + down) * 8 / (MBIT * 1e6 * netns.PAYLOAD_SHARE) + compute_s
    return [
        Figure(f"split step, one device at {MBIT} Mbit/s", step_s, "s"),
        Figure("its bytes, both ways", (up + down) / 1e6, "MB"),
        Figure("its computation in one process", compute_s, "s"),
        Figure("split step beyond bytes at that rate and computation", 100 * (step_s / ideal_s - 1), "%", MOST_OFF),
    ]


def in_replay() -> list[Figure]:
    """Compare a replay's rounds with the loop."""
    with tempfile.TemporaryDirectory(prefix="split-") as name:
        planned(Path(name), steps=STEPS, rounds=ROUNDS)
        round_s = statistics.median(replayed(Path(name)))
        loop_s = _median([alone(Path(name), DEVICES, 1)])
    return [
        Figure("replay of split sessions", DEVICES * STEPS / round_s, "device-steps/s"),
        Figure("the loop, 1 thread", DEVICES / loop_s, "device-steps/s"),
    ]


CASES = {"loopback": on_loopback, "link": behind_a_link, "replay": in_replay}


def run(wanted: list[str] | None = None) -> list[Figure]:
    """Measure the cases named, or all."""
    return [figure for name in wanted or CASES for figure in CASES[name]()]


if __name__ == "__main__":
    for one in run(sys.argv[1:]):
        sys.stdout.write(f"{one.name}: {one.value:.4g} {one.unit} {one.target} {'' if one.ok else 'MISSED'}\n")
