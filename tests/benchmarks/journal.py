"""Memory and seconds of the commands that look at a long run, and of resuming it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import fleet
from measure import Figure

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Joined,
    RoundClosed,
    RoundOpened,
    RunOpened,
    ServerBegan,
    UpdateAccepted,
)
from edge_server.journal.sqlite import JOURNAL
from edge_server.learner import initial_network, plan_algorithm
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.protocol.measurements import Cost, Provenance
from shared.protocol.messages import Assignment, Hyper, Transfer, Update

DEVICES, UPDATES, QUICK_UPDATES = 50, 110_000, 5_000
TRANSFER_BYTES = 4 * (fleet.HIDDEN_PER_PARAMETER + 10)
COMMANDS = (
    ("runs", "<= 0.3", "<= 80"),
    ("show bench", "", "<= 150"),
    ("report bench", "", "<= 150"),
    ("report bench --format csv", "", "<= 150"),
    ("report bench --format json", "", "<= 150"),
)
"""Command, its seconds and the most megabytes."""
MEASURE = """
import resource, subprocess, sys, time
began = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""  # in a small process: the peak of a child includes that of the process it was forked from
MEASURED = {"compute_joules": Provenance(source="ina3221", quality="measured")}


def run(*, quick: bool = False) -> Sequence[Figure]:
    """Measure looking at a run of many updates, and going on with it against a new run."""
    updates = QUICK_UPDATES if quick else UPDATES
    rows = list[Figure]()
    with tempfile.TemporaryDirectory(prefix="journal-", dir=_build_folder()) as name:
        folder = Path(name)
        (folder / "plan.toml").write_text(make_plan(updates))
        write_run(folder / "runs" / "bench", load(folder / "plan.toml", folder), updates)
        size = (folder / "runs" / "bench" / JOURNAL).stat().st_size
        case = f"{updates} updates, {size / 1e6:.0f} MB"
        for command, most_s, most_mb in COMMANDS:
            seconds, peak_mb = run_command(*command.split(), "--data-dir", str(folder / "runs"))
            rows.append(Figure(f"{command}, {case}", seconds, "s", most_s))
            rows.append(Figure(f"{command} memory, {case}", peak_mb, "MB", most_mb))
    long, new = (asyncio.run(_resume(count)) for count in (updates, 0))
    rows.append(Figure(f"server memory, resumed over new, {case}", (long - new) / 1e6, "MB", "<= 150"))
    return rows


def _build_folder() -> Path:
    Path("build").mkdir(exist_ok=True)
    return Path("build")


async def _resume(updates: int) -> int:
    """Return the server's peak memory in two rounds of a run with so many updates before."""

    def prepare(folder: Path) -> None:
        if updates:
            write_run(folder / "bench", load(folder / "plan.toml", folder), updates)

    rounds = updates // DEVICES + 2
    done = await fleet.measure(
        model_bytes=0, devices=DEVICES, rounds=rounds, echo=True, memory=True, keys=BUDGET, prepare=prepare
    )
    return done.peak_bytes


BUDGET = "[budget]\ntime_s = 1e9"


def make_plan(updates: int) -> str:
    """Return a plan of the benchmark's fleet whose last two rounds are missing."""
    rounds = updates // DEVICES + 2
    return fleet.PLAN.format(rounds=rounds, hidden=1, devices=DEVICES, epochs=0) + BUDGET


def run_command(*arguments: str) -> tuple[float, float]:
    """Run a command of the edge server; return its seconds and the most megabytes that it took."""
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "edge_server", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak_kib = done.stdout.split()
    return float(seconds), int(peak_kib) * 1024 / 1e6


def write_run(folder: Path, plan: Plan, updates: int) -> None:
    """Write a run of so many updates that can be resumed."""
    with closing(SqliteStore(folder, durable=False)) as store:
        batch = list[AnyRecord]()
        for record in make_records(plan, updates // DEVICES):
            batch.append(record)
            if len(batch) == 10_000:
                store.extend(batch)
                batch.clear()
        store.extend(batch)
        store.save(updates // DEVICES, plan_algorithm(plan).init(initial_network(plan, ""), plan.seed))


def make_records(plan: Plan, rounds: int) -> Iterator[AnyRecord]:
    """Yield the records of a run whose devices measure everything, without its end."""
    random, names = Random(1), [f"echo-{index}" for index in range(DEVICES)]
    yield RunOpened(run="bench", plan=plan, started="20260101T000000Z")
    yield ServerBegan(at=0.0, utc_s=1.76e9)
    yield from (Joined(device=name, at=0.5) for name in names)
    for number in range(1, rounds + 1):
        at = 2.0 * number
        assigned = {name: Assignment(seed=random.getrandbits(60), hyper=Hyper()) for name in names}
        yield RoundOpened(round=number, assignments=assigned, at=at, online=DEVICES)
        for name in names:
            update = _make_update(random, name, number)
            yield UpdateAccepted(round=number, device=name, update=update, bytes_up=TRANSFER_BYTES, at=at + 1)
        carried = dict.fromkeys(names, TRANSFER_BYTES)
        yield RoundClosed(
            round=number,
            outcome="aggregated",
            arrived=tuple(names),
            loss=random.random(),
            seconds=1.5,
            at=at + 1.5,
            bytes_up=carried,
            bytes_down=carried,
        )
        for name in names:
            yield CostSettled(round=number, device=name, cost=_make_cost(random, upload_s=0.1 * random.random()))


def _make_update(random: Random, device: str, number: int) -> Update:
    return Update(
        run="bench",
        round=number,
        device=device,
        params=Transfer(digest=random.randbytes(16), size=TRANSFER_BYTES, frame_bytes=1024),
        start=random.randbytes(16),
        weight=2.0,
        num_examples=2,
        loss=random.random(),
        cost=_make_cost(random),
    )


def _make_cost(random: Random, upload_s: float | None = None) -> Cost:
    return Cost(
        download_s=0.1 * random.random(),
        compute_s=0.2 * random.random(),
        upload_s=upload_s,
        bytes_down=TRANSFER_BYTES,
        bytes_up=TRANSFER_BYTES,
        download_joules=random.random(),
        compute_joules=random.random(),
        upload_joules=upload_s and random.random(),
        idle_w=2.0,
        provenance=MEASURED,
    )
