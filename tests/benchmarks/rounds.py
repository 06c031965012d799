"""Whole rounds against the bare broker, in turn within one run, so that a noisy machine slows both alike."""

from __future__ import annotations

import asyncio
import statistics

import fleet
import floor
from measure import Figure

SIZES = ((4_000, "4kB", 60, 60), (25_000_000, "25MB", 14, 14), (100_000_000, "100MB", 8, 8))
TURNS = 3
TARGET_S = {"4kB": "<= 0.010", "25MB": "<= 0.3", "100MB": "<= 1.3"}
TARGET_CPU_S = {"4kB": "<= 0.012"}
TARGET_RATIO = {"25MB": "<= 2.2", "100MB": "<= 3.5"}
PEER_S = {"25MB": 0.485, "100MB": 2.66}  # the fastest peer, on the reference machine, without storing anything


def run(*, quick: bool = False) -> list[Figure]:
    """Measure rounds of three sizes with two agents."""
    figures: list[Figure] = []
    for size, name, rounds, floor_rounds in SIZES[:1] if quick else SIZES:
        ours: list[float] = []
        bare: list[float] = []
        cpu: list[float] = []
        for _ in range(1 if quick else TURNS):
            bare += asyncio.run(floor.measure(model_bytes=size, devices=2, rounds=floor_rounds))
            one = asyncio.run(fleet.measure(model_bytes=size, devices=2, rounds=rounds))
            ours += one.round_s
            if one.cpu_s is None:
                raise RuntimeError(f"the rounds of {name} are too short to sample CPU time; run more of them")
            cpu.append(one.cpu_s)
        round_s, floor_s = statistics.median(ours), statistics.median(bare)
        figures += [
            Figure(f"round {name}", round_s, "s", TARGET_S[name]),
            Figure(f"round {name}, CPU of all processes", statistics.median(cpu), "s", TARGET_CPU_S.get(name, "")),
            Figure(f"bare MQTT {name}", floor_s, "s"),
            Figure(f"round {name} over bare MQTT", round_s / floor_s, "x", TARGET_RATIO.get(name, "")),
        ]
        if name in PEER_S:
            figures.append(Figure(f"fastest peer over round {name}", PEER_S[name] / round_s, "x", ">= 1.6"))
    return figures
