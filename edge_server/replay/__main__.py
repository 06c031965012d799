"""Composition of a replay: files in, record out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import msgspec
import torch
import xxhash

from edge_server.replay.play import play
from edge_server.store.base import AnyRecord
from edge_server.store.sqlite import SqliteStore
from edge_server.trial.plan import Plan, devices, load
from shared.clock import VirtualLoop
from shared.tree import State


def main(plan_path: Path, data_root: Path, data_dir: Path, count: int) -> tuple[Path, list[AnyRecord]]:
    """Replay a plan; return the run's folder and its records.

    Raises:
        ConfigError: The plan cannot be used.
    """
    plan = load(plan_path, data_root)
    folder = data_dir / name_of(plan)
    shutil.rmtree(folder, ignore_errors=True)
    _, records = replay(plan, folder, count)
    return folder, records


def name_of(plan: Plan) -> str:
    """Return the name of a plan's replay: a function of the plan, so that replaying twice writes the same record."""
    return f"{plan.name[:32]}-replay-{xxhash.xxh3_64_hexdigest(msgspec.json.encode(plan))[:8]}"


def replay(plan: Plan, folder: Path, count: int = 0) -> tuple[State, list[AnyRecord]]:
    """Run a plan on virtual time into a new folder; return the final state and the records."""
    torch.set_num_threads(1)
    store = SqliteStore(folder, durable=False)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fieldfleet-") as place,
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
        ):
            state = runner.run(play(plan, devices(plan, count), folder.name, store, Path(place)))
        store.export()
        return state, store.records()
    finally:
        store.close()
