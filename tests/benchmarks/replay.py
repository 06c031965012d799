"""Replay against the same training with no framework at all, and against a Flower simulation; a fleet of 10,000.

All train on two processes, in turn, so that what else the machine does meets all of them; a round's seconds are
medians, for each of them without the start and the first rounds. Memory is the proportional set size of all processes,
the start included, at most. `together` is the same replay where the plan lets several devices train in one pass.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import training
from measure import Figure, NotRun, Row

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FLOWER = ROOT / "build" / "flower"
PINNED = ("torch==2.13.0", "flwr[simulation]")
DEVICES, WORKERS, TURNS, WARM = 100, 2, 3, 2
QUICK, QUICK_FLEET, QUICK_ROUNDS = "small", 100, WARM + 2
COHORT = {"small": 10, "large": 10, "perceptron": 50}
ROUNDS = {"small": 12, "large": 6, "perceptron": 6}
LEAST = {"small": {"replay": ">= 1.7"}, "large": {"replay": ">= 1.25"}, "perceptron": {"together": ">= 3"}}
"""Times Flower's rate. Both CNNs are trained one device at a time whatever the plan allows: that is as fast."""
FLEET, FLEET_ROUNDS = 10_000, 100
LAID_OUT = "bare, channels last"
"""The bare loop with its network in memory as the trainer lays it out, which few loops are written with: what remains
is what the framework itself takes."""

PLAN = """
name = "bench"
rounds = {rounds}
[algorithm]
name = "fedavg"
[model]
{model}
[data]
source = "npz"
path = "examples.npz"
[hyper]
batch_size = {batch}
local_epochs = {epochs}
learning_rate = {rate}
[cohort]
size = {cohort}
min_devices = {devices}
[round]
deadline_s = 3600.0
[evaluation]
every = 0
[partition]
kind = "even"
"""
TOGETHER = "\n[replay]\ntogether = true"
"""Follows the table of the model."""


@dataclass(frozen=True)
class Ran:
    """What one program took: seconds of each round, seconds in all, bytes of memory at most."""

    rounds_s: list[float]
    all_s: float
    peak_bytes: int


def run(*, quick: bool = False) -> list[Row]:
    """Measure the networks, then the large fleet; quickly one network, without Flower, which would be installed."""
    flower = not quick and install()
    figures: list[Row] = []
    if not flower:
        reason = "its simulation takes gigabytes and is left out of quick runs" if quick else "it cannot be installed"
        figures.append(NotRun("replay: Flower", reason))
    for name in [QUICK] if quick else training.SHAPES:
        count = QUICK_ROUNDS if quick else ROUNDS[name]
        ran: dict[str, list[Ran]] = {"bare": [], LAID_OUT: [], "replay": [], "together": [], "flower": []}
        for _ in range(1 if quick else TURNS):
            ran["bare"].append(bare(name, count))
            ran[LAID_OUT].append(bare(name, count, "channels-last"))
            ran["replay"].append(replay(name, count))
            if "together" in LEAST[name]:
                ran["together"].append(replay(name, count, TOGETHER))
            if flower:
                ran["flower"].append(in_flower(name, count))
        figures += compared(name, {who: several for who, several in ran.items() if several})
    return [*figures, *(large_fleet(QUICK_FLEET, QUICK_ROUNDS) if quick else large_fleet(FLEET, FLEET_ROUNDS))]


def compared(name: str, ran: dict[str, list[Ran]]) -> list[Figure]:
    """Return rates, ratios and memory of one network."""
    taken = {who: statistics.median(s for one in several for s in one.rounds_s[WARM:]) for who, several in ran.items()}
    peak = {who: statistics.median(one.peak_bytes for one in several) for who, several in ran.items()}
    figures = [Figure(f"{name}: {who}", COHORT[name] / seconds, "device-rounds/s") for who, seconds in taken.items()]
    figures += [Figure(f"{name}: {who}, memory", peak[who] / 1e6, "MB") for who in ran]
    figures.append(Figure(f"{name}: replay's seconds over bare", taken["replay"] / taken["bare"], "x", "<= 1.1"))
    same = taken["replay"] / taken[LAID_OUT]
    figures.append(Figure(f"{name}: replay's seconds over {LAID_OUT}", same, "x"))
    if "together" in ran:
        figures.append(
            Figure(f"{name}: together's rate over replay's", taken["replay"] / taken["together"], "x", ">= 1")
        )
    if "flower" in ran:
        for who, least in LEAST[name].items():
            figures.append(Figure(f"{name}: {who}'s rate over Flower's", taken["flower"] / taken[who], "x", least))
        smaller = peak["replay"] / peak["flower"]
        figures.append(Figure(f"{name}: replay's memory over Flower's", smaller, "x", "<= 0.5"))
    return figures


def large_fleet(count: int, rounds: int) -> list[Figure]:
    """Replay so many devices, 100 a round, with 9,550 parameters."""
    model = 'name = "mlp"\noptions = { features = 784, hidden = 12, classes = 10 }'
    inputs, labels = np.zeros((6 * count, 28, 28), np.uint8), np.arange(6 * count) % 10
    inputs[np.arange(6 * count), labels, labels] = 255
    ran = replayed(model, inputs, labels, rounds=rounds, cohort=100, devices=count, epochs=1)
    return [
        Figure(f"{count:,} devices: {rounds} rounds of 100", ran.all_s, "s", "<= 180"),
        Figure(f"{count:,} devices: memory", ran.peak_bytes / 1e6, "MB", "<= 1500"),
    ]


def bare(name: str, rounds: int, *more: str) -> Ran:
    """Run the bare loop."""
    arguments = (name, DEVICES, COHORT[name], rounds, WORKERS, *more)
    said, all_s, peak = watched([sys.executable, str(HERE / "bare.py"), *map(str, arguments)])
    return Ran(json.loads(said.splitlines()[-1]), all_s, peak)


def in_flower(name: str, rounds: int) -> Ran:
    """Run the Flower simulation."""
    with tempfile.TemporaryDirectory(prefix="fieldfleet-bench-") as folder:
        path = f"{folder}/examples"
        training.save(path, DEVICES)
        arguments = (path, name, DEVICES, COHORT[name], rounds + 1, WORKERS)
        said, all_s, peak = watched([str(FLOWER / "bin" / "python"), str(HERE / "flower.py"), *map(str, arguments)])
    *_, used, taken = said.splitlines()
    sys.stderr.write(f"{used}\n")
    return Ran(json.loads(taken), all_s, peak)


def replay(name: str, rounds: int, more: str = "") -> Ran:
    """Replay the same training, with `more` in its plan."""
    width, hidden = training.SHAPES[name]
    inputs, labels = training.examples(DEVICES)
    pixels = (inputs.numpy() * 255).round().astype(np.uint8)
    layers = f"width = {width}, " if width else "features = 784, classes = 10, "
    model = f'name = "{"cnn" if width else "mlp"}"\noptions = {{ {layers}hidden = {hidden} }}'
    scale = {"rounds": rounds, "cohort": COHORT[name], "devices": DEVICES, "epochs": training.EPOCHS[name]}
    return replayed(model + more, pixels, labels.numpy(), **scale)


def replayed(model: str, inputs: np.ndarray, labels: np.ndarray, *, devices: int, **scale: int) -> Ran:
    """Write a plan and its data, and replay it in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fieldfleet-bench-") as name:
        folder = Path(name)
        np.savez(folder / "examples.npz", x_train=inputs, y_train=labels, x_test=inputs[:10], y_test=labels[:10])
        settings = {"model": model, "batch": training.BATCH, "rate": training.RATE}
        plan = PLAN.format(devices=devices, **scale, **settings)
        (folder / "plan.toml").write_text(plan)
        command = [sys.executable, str(HERE / "replay_once.py"), str(folder), str(devices), str(WORKERS)]
        said, all_s, peak = watched(command)
    return Ran(json.loads(said.splitlines()[-1]), all_s, peak)


def install() -> bool:
    """Make Flower's environment, torch first and pinned; say so where that cannot be, and do without."""
    if (FLOWER / "ready").exists():
        return True
    try:
        subprocess.run([sys.executable, "-m", "venv", str(FLOWER)], check=True)
        for package in PINNED:
            command = [str(FLOWER / "bin" / "pip"), "install", "--quiet", package]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"Flower cannot be installed here ({error}): it is left out\n")
        return False
    (FLOWER / "ready").touch()
    return True


def watched(command: Sequence[str]) -> tuple[str, float, int]:
    """Run a program; return what it said, its seconds, and the most memory that it and its children had."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    began, peak, over = time.perf_counter(), 0, threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:

        def sample() -> None:
            nonlocal peak
            while not over.wait(0.5):
                peak = max(peak, memory(process.pid))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        said, _ = process.communicate()
        over.set()
        sampler.join()
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return said.decode(), time.perf_counter() - began, peak


def memory(pid: int) -> int:
    """Return the proportional set size of a process and its descendants, in bytes."""
    total = 0
    try:
        root = psutil.Process(pid)
        for one in [root, *root.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    except psutil.NoSuchProcess:
        pass
    return total
