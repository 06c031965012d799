"""Run one cell of a study in this process."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from edge_server.journal.runs import read_versions
from edge_server.replay.run import replay_plan, replay_sites
from edge_server.replay.study.result import RESULT, Order, Result, hash_of
from edge_server.replay.study.sites import digest_cell
from shared.errors import ConfigError
from shared.runtime.clock import Clock, monotonic


def run_cell(order: Order, clock: Clock = monotonic) -> Path:
    """Run a cell into a new folder and write its result last; return the folder."""
    folder = Path(order.place) / order.cell
    shutil.rmtree(folder, ignore_errors=True)
    began = clock()
    if order.plan.sites:
        folder.mkdir(parents=True)
        replay_sites(order.plan, {site: folder / site for site in order.plan.sites.names})
    else:
        replay_plan(order.plan, folder, order.devices)
    result = Result(
        devices=order.devices,
        seconds=clock() - began,
        versions=read_versions(),
        journal=hash_of(folder, order.plan),
        digest=msgspec.structs.replace(digest_cell(folder, order.plan), devices=[], tasks=[]),
    )
    (folder / RESULT).write_bytes(msgspec.json.encode(result))
    return folder


def run_remote_cell(order: bytes, expected: dict[str, str]) -> dict[str, bytes]:
    """Run a cell, ordered in JSON, on another machine; return its files by relative path.

    Args:
        expected: Versions on the requesting machine; others may compute other bits.

    Raises:
        ConfigError: The versions on this machine differ.
    """
    if (local := read_versions()) != expected:
        raise ConfigError(f"a node of the cluster has {local}, this machine {expected}; install the same on both")
    with tempfile.TemporaryDirectory(prefix="fieldfleet-") as place:
        decoded = msgspec.json.decode(order, type=Order)
        folder = run_cell(msgspec.structs.replace(decoded, place=place))
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
