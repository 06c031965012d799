"""A fleet of 10,000 against the textbook: every second, joule and byte of every task of a hundred rounds."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from measure import Figure

from edge_server.replay.run import count_cores, replay_plan
from tests.edge_server.replay.textbook_fleet import COMPUTE, GIVEN, POWER, expected, fleet_of, furthest, plan_of

DEVICES, COHORT, ROUNDS = 10_000, 100, int(os.environ.get("ROUNDS", "100"))
QUICK = 300, 10, 3


def run(*, quick: bool = False) -> list[Figure]:
    """Replay the fleet with a model of 10,000 parameters, on all cores."""
    count, size, rounds = QUICK if quick else (DEVICES, COHORT, ROUNDS)
    with tempfile.TemporaryDirectory() as place:
        keys = f"{COMPUTE}\n{GIVEN}\n{POWER}"
        plan = plan_of(Path(place), keys, rounds=rounds, hidden=832, count=count, size=size)
        began = time.monotonic()
        _, records = replay_plan(plan, Path(place) / "run", workers=count_cores())
        took_s = time.monotonic() - began
        worst = furthest(records, expected(plan, "run", fleet_of(plan)))
    return [
        Figure(f"{count:,} devices, {rounds} rounds: furthest figure from the textbook", worst, "share", "<= 1e-06"),
        Figure("the same: replay", took_s, "s"),
    ]
