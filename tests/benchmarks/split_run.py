"""The plan of the benchmark of split steps, and what its runs leave behind."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from edge_server.journal.records import RoundOpened, UpdateAccepted, closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan, devices
from edge_server.rounds.check_plan import load

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
CIFAR = ROOT / os.environ.get("FIELDFLEET_DATA", "../shared/data") / "cifar10" / "cifar10_20k.npz"
CORES = os.cpu_count() or 1
DEVICES, WARM, ROUNDS = 4, 2, 2
"""Of the loop, the first steps are left out; of a run, all rounds but the last."""
PLAN = """
name = "split"
rounds = {rounds}
[algorithm]
name = "splitfed"
options = {{ cut = 1, period = {steps} }}
[model]
name = "alexnet"
options = {network}
[hyper]
batch_size = {batch}
learning_rate = 0.01
[cohort]
min_devices = {count}
[round]
deadline_s = 3600.0
step_deadline_s = 600.0
[evaluation]
every = 0
[partition]
kind = "even"
[data]
source = "npz"
path = "{data}"
mean = [0.49, 0.48, 0.45]
std = [0.25, 0.24, 0.26]
limit = {examples}
"""


@dataclass(frozen=True)
class Size:
    """Of a session: its steps, examples a batch, and what its network has other than AlexNet for CIFAR."""

    steps: int
    batch: int = 64
    network: str = "{}"


QUICK = Size(steps=3, batch=4, network="{ width = 0.25, hidden = 64 }")


@dataclass(frozen=True)
class Stepped:
    """What the steps of a session took.

    Attributes:
        step_s: Seconds of steps, means of sessions; the first session, or the first steps, are left out.
        cpu_s: Processor seconds a step, by kind of process, all of a kind together.
        memory_bytes: Resident memory in the session, by kind of process; of one of each.
    """

    step_s: list[float]
    cpu_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]


def planned(folder: Path, size: Size, *, count: int, rounds: int = ROUNDS) -> Plan:
    """Write a plan, and random pictures of CIFAR-10's shape where that is not here; return the plan."""
    data = CIFAR.resolve()
    if not data.exists():
        data, draw = folder / "random.npz", np.random.default_rng(0)
        inputs = draw.integers(0, 256, (2 * count * size.batch, 32, 32, 3), np.uint8)
        labels = draw.integers(0, 10, len(inputs))
        np.savez(data, x_train=inputs, y_train=labels, x_test=inputs[:10], y_test=labels[:10])
    path = folder / "plan.toml"
    sizes = {"rounds": rounds, "steps": size.steps, "count": count, "batch": size.batch, "network": size.network}
    path.write_text(PLAN.format(data=data, **sizes, examples=2 * count * size.batch))
    return load(path, folder)


def server_keys(folder: Path) -> dict[str, object]:
    """Return the configuration of the edge server, without its broker."""
    keys = {"plan": "plan.toml", "site": "lab", "run": "run", "data_dir": str(folder)}
    return {**keys, "threads": CORES}


def agent_keys(folder: Path, plan: Plan, index: int) -> dict[str, object]:
    """Return the configuration of the agent of one device, without its broker."""
    fleet = devices(plan, plan.cohort.min_devices)
    data = msgspec.to_builtins(device_data(plan, fleet, index))
    name = fleet[index].name
    return {"device": name, "site": "lab", "state_dir": str(folder / name), "data": data, "trainer": {"threads": 1}}


def opened_and_closed(folder: Path) -> tuple[float, float]:
    """Return when the last round's devices were told, and when it was over, on the monotonic clock."""
    records = read_records(folder / "run")
    closed = closed_rounds(records)[-1]
    [opened] = [one for one in records if isinstance(one, RoundOpened) and one.round == closed.round]
    return opened.at, closed.at


def steps_s(folder: Path, steps: int) -> list[float]:
    """Return the mean seconds of a step of the last round, as each device measured its own session."""
    records = read_records(folder / "run")
    last = closed_rounds(records)[-1].round
    costs = [one.update.cost for one in records if isinstance(one, UpdateAccepted) and one.round == last]
    return [(one.compute_s + one.exchange_s) / steps for one in costs]


def carried(folder: Path, steps: int) -> tuple[float, float]:
    """Return the bytes of frames of one device's step, up and down; refuse a run whose steps were not all whole."""
    records = read_records(folder / "run")
    closed = closed_rounds(records)
    if not closed or any(one.steps != steps or one.missed or one.refused for one in closed):
        raise RuntimeError(f"steps were missed or refused: {closed}")
    costs = [one.update.cost for one in records if isinstance(one, UpdateAccepted)]
    ways = [one.features_bytes or 0 for one in costs], [one.gradient_bytes or 0 for one in costs]
    up, down = (sum(way) / len(way) / steps for way in ways)
    return up, down


def alone(folder: Path, count: int, threads: int) -> Stepped:
    """Do the steps of a folder's plan in one process, which is started for it."""
    said = script("split_alone.py", folder / "plan.toml", count, threads)
    taken, cpu_s, memory = json.loads(said)
    return Stepped([statistics.fmean(taken[WARM:])], {"alone": cpu_s}, {"alone": memory})


def script(name: str, *arguments: object) -> str:
    """Run a script of this folder; return the last line that it printed."""
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
    return done.stdout.splitlines()[-1]


def median_s(several: list[Stepped]) -> float:
    """Return the median step."""
    return statistics.median(second for one in several for second in one.step_s)
