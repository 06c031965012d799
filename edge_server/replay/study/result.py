"""Order, start, end and result of one cell of a study."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from edge_server.plan.plan import Plan
from edge_server.replay.study.grid import Cell
from edge_server.report.digest import Digest

RESULT, JOURNAL = "cell.json", "journal.jsonl"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order to run a cell in a folder of its name below `place`; `devices` as in `edge_server.plan.plan.devices`."""

    cell: str
    plan: Plan
    devices: int
    place: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a cell, stored beside its journal.

    Attributes:
        seconds: Real seconds of the computation; no figure of the run depends on it.
        journal: XXH3-128 of the journals of all its sites, in hexadecimal.
        digest: Digest of the run, over all sites, without single devices and tasks.
    """

    devices: int
    seconds: float
    versions: dict[str, str]
    journal: str
    digest: Digest


class CellStarted(NamedTuple):
    """Start of a cell, by a local process or, if None, on a cluster."""

    cell: str
    process: int | None


class CellEnded(NamedTuple):
    """End of a cell; `cause` is empty if it succeeded."""

    cell: str
    cause: str


def make_order(cell: Cell, place: Path) -> Order:
    """Return the order to run a cell below `place`."""
    return Order(cell=cell.name, plan=cell.plan, devices=cell.devices, place=str(place))


def read_result(cell: Cell, folder: Path) -> Result | None:
    """Return the result of a cell; None if `folder` holds no complete run of exactly this plan."""
    try:
        result = msgspec.json.decode((folder / RESULT).read_bytes(), type=Result)
        is_complete = hash_of(folder, cell.plan) == result.journal
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return result if is_complete and (result.digest.plan, result.devices) == (cell.plan, cell.devices) else None


def hash_of(folder: Path, plan: Plan) -> str:
    """Return the hash of a run's journals, one per site in the plan's order."""
    digest = xxhash.xxh3_128()
    for site in plan.sites.names if plan.sites else [""]:
        with (folder / site / JOURNAL).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
