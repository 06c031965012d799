"""What a cell is told and what it leaves: an order, and beside its journal a result."""

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
    """A cell to be run.

    Attributes:
        cell: Its name, that of its run and of its folder.
        devices: How many, as `edge_server.plan.plan.devices` takes it.
        place: Where its folder is made.
    """

    cell: str
    plan: Plan
    devices: int
    place: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell came to.

    Attributes:
        devices: As it was ordered.
        seconds: That it took on the machine that ran it; no figure of the run depends on them.
        versions: Of what computed it.
        journal: XXH3-128 of its journal, or of its sites' together, in hexadecimal.
        digest: Of its run, at all sites together, without the single devices and tasks.
    """

    devices: int
    seconds: float
    versions: dict[str, str]
    journal: str
    digest: Digest


class Began(NamedTuple):
    """A cell is being run, by a process of this machine or, where there is none, on a cluster."""

    cell: str
    process: int | None


class Ended(NamedTuple):
    """A cell has ended; `cause` says why it failed, and is empty where it did not."""

    cell: str
    cause: str


def order_of(cell: Cell, place: Path) -> Order:
    """Return the order to run a cell."""
    return Order(cell=cell.name, plan=cell.plan, devices=cell.devices, place=str(place))


def read_result(cell: Cell, folder: Path) -> Result | None:
    """Return what a cell came to; None where `folder` holds no whole run of this very plan."""
    try:
        result = msgspec.json.decode((folder / RESULT).read_bytes(), type=Result)
        is_complete = hash_of(folder, cell.plan) == result.journal
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return result if is_complete and (result.digest.plan, result.devices) == (cell.plan, cell.devices) else None


def _journals(folder: Path, plan: Plan) -> list[Path]:
    """Return where a cell's journals stand: that of its only site, or one of each in the plan's order."""
    return [folder / site / JOURNAL for site in plan.sites.names] if plan.sites else [folder / JOURNAL]


def hash_of(folder: Path, plan: Plan) -> str:
    """Return the hash of a run's journal, of several sites of theirs one after another."""
    digest = xxhash.xxh3_128()
    for journal in _journals(folder, plan):
        with journal.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
