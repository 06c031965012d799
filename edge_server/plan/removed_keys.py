"""Removed plan keys: refused in new plans, ignored in existing runs.

Journals and traces hold every key of a plan, also those at their defaults, so old ones have the removed keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from edge_server.plan.plan import Plan
from shared.config import convert, parse, read_bytes
from shared.errors import ConfigError

log = logging.getLogger(__name__)

_STALE = "one hour applies to every optimizer; no paper names this limit"


@dataclass(frozen=True)
class RemovedKey:
    """Key that plans of earlier versions may have.

    Attributes:
        table: Path of its table; `[]` marks an array of tables.
        value: Default of the key, which always applies now.
        reason: Why it was removed, for the error message.
    """

    table: str
    name: str
    value: float | str
    reason: str


REMOVED_KEYS = (
    RemovedKey("round", "most_diverged", 3, "the third diverged round in a row returns the run to its last good model"),
    RemovedKey("device[].link", "loss_db_1m", 40.0, "`gain` scales a link by the same factor"),
    RemovedKey("optimizer.options", "stale_s", 3600.0, _STALE),
    RemovedKey("fallback.optimizer.options", "stale_s", 3600.0, _STALE),
)


@dataclass(frozen=True)
class DroppedKey:
    """Removed key found in a plan.

    Attributes:
        place: Its path, such as `device[0].link.loss_db_1m`.
        planned: Value in the plan.
    """

    place: str
    planned: object
    key: RemovedKey

    def __str__(self) -> str:
        """Describe the key for a report that it is ignored."""
        value, reason = self.key.value, self.key.reason
        return f"{self.place} = {self.planned!r} is ignored: the key was removed and is always {value!r} ({reason})"


def drop_removed_keys(plan: Any) -> list[DroppedKey]:
    """Delete the removed keys of a decoded plan, in place, and return them; anything but a table has none."""
    return [
        DroppedKey(f"{place}.{key.name}", table.pop(key.name), key)
        for key in REMOVED_KEYS
        for place, table in list(_find_tables(plan, "", key.table.split(".")))
        if key.name in table
    ]


def _find_tables(value: Any, place: str, path: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables at a path with their places."""
    if not isinstance(value, dict):
        return
    if not path:
        yield place, value
        return
    name, is_array = path[0].removesuffix("[]"), path[0].endswith("[]")
    below, inner = value.get(name), f"{place}.{name}".lstrip(".")
    if not is_array:
        yield from _find_tables(below, inner, path[1:])
    elif isinstance(below, list):
        for index, item in enumerate(below):
            yield from _find_tables(item, f"{inner}[{index}]", path[1:])


def read_plan(path: Path, is_resumed: Callable[[Plan], bool] = lambda _: False) -> Plan:
    """Read a plan; see `parse_plan`."""
    return parse_plan(read_bytes(path), path, is_resumed)


def parse_plan(data: bytes, path: Path, is_resumed: Callable[[Plan], bool] = lambda _: False) -> Plan:
    """Parse a plan file.

    Args:
        is_resumed: Returns whether a run that is not new has a plan; then removed keys are ignored.

    Raises:
        ConfigError: As `shared.config.parse`, or a new plan has a removed key.
    """
    return convert_plan(parse(data, dict[str, Any], path), path, is_resumed)


def convert_plan(table: dict[str, Any], path: Path, is_resumed: Callable[[Plan], bool] = lambda _: False) -> Plan:
    """Convert a decoded plan, with the errors of `parse_plan`.

    Args:
        path: Name of the plan, for errors.
    """
    dropped = drop_removed_keys(table)
    if not dropped:
        return convert(table, Plan, path)
    refusal = "\n".join(
        f"{path}: {drop.place}: this key was removed and is always {drop.key.value!r} ({drop.key.reason}); delete it"
        for drop in dropped
    )
    try:
        plan = msgspec.convert(table, Plan)
    except msgspec.ValidationError as error:
        raise ConfigError(refusal) from error
    if not is_resumed(plan):
        raise ConfigError(refusal)
    _report(dropped)
    return plan


def without_removed_keys(record: bytes) -> bytes:
    """Return a JSON record of a stored run without the removed keys of its `plan`.

    Data that cannot be decoded are returned unchanged; the caller's decoder reports the fault.
    """
    try:
        table = msgspec.json.decode(record)
        dropped = drop_removed_keys(table.get("plan")) if isinstance(table, dict) else []
        cleaned = msgspec.json.encode(table) if dropped else record
    except (msgspec.MsgspecError, RecursionError, OverflowError, ValueError):
        return record
    _report(dropped)
    return cleaned


def _report(dropped: Sequence[DroppedKey]) -> None:
    """Log keys with another value than the default: only these had an effect."""
    for drop in dropped:
        if drop.planned != drop.key.value:
            warn_once(str(drop))


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Log a warning once per process: a journal is decoded many times."""
    log.warning("%s", message)
