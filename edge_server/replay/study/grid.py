"""Study grid: a cell for every variant and combination of values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from edge_server.plan.data import resolve_data
from edge_server.plan.plan import Plan, devices
from edge_server.plan.removed_keys import parse_plan
from edge_server.replay.study.spec import SEED, Study, Variant, canonical
from edge_server.replay.study.toml_lines import line_of
from edge_server.rounds.check_plan import check
from shared.errors import ConfigError

Table: TypeAlias = dict[str, Any]

MAX_CELLS = 10_000
NAME_CHARS, HASH_CHARS = 55, 8
# File name that the plan's decoder puts before its errors.
PLAN = Path("plan.json")


class Change(NamedTuple):
    """Value that a cell sets in the plan; `where` has the parts of its key in the study file, `place` its variant."""

    key: str
    value: Any
    where: tuple[str, ...]
    place: int = 0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a study.

    Attributes:
        name: Name of its run and folder, a function of the variant's name and the grid's values.
        settings: Its grid values by key, without the seeds.
        seeds: Its values of the keys that are averaged over.
        devices: Number of devices, as in `edge_server.plan.plan.devices`.
    """

    name: str
    variant: str
    settings: dict[str, Any]
    seeds: dict[str, Any]
    plan: Plan
    devices: int = 0


def build_cells(study: Study, base: Table, path: Path, text: str, data_root: Path) -> list[Cell]:
    """Return the cells of a study, ordered by variant, then by grid, the last key changing fastest.

    Args:
        base: Decoded plan, not yet checked.
        text: Content of the study file at `path`, for line numbers in errors.
        data_root: Folder of data sets, for relative paths in the plan.

    Raises:
        ConfigError: A key or value is invalid or set twice, or there are too many cells; the message names the line.
    """
    axes = _axes(study, path, text)
    cells_by_name: dict[str, Cell] = {}
    for index, variant in enumerate(study.variant or (Variant(name=""),)):
        fixed = [Change(key, value, ("variant", "set", *key.split(".")), index) for key, value in _leaves(variant.set)]
        for combination in product(*axes):
            changes = [*fixed, *combination]
            _require_no_overwrite(changes, path, text)
            plan = _plan(base, changes, path, text, study.devices)
            name = name_cell(variant.name, combination)
            if name in cells_by_name:
                raise ConfigError(f"{path}: cell {name!r} occurs twice; list every value of the grid once")
            cells_by_name[name] = Cell(
                name=name,
                variant=variant.name,
                settings={change.key: change.value for change in combination if change.key not in study.seeds},
                seeds={change.key: change.value for change in combination if change.key in study.seeds},
                plan=resolve_data(plan, data_root),
                devices=study.devices,
            )
    return list(cells_by_name.values())


def name_cell(variant: str, changes: Sequence[Change]) -> str:
    """Return the name of a cell: a readable start and a hash of all its values."""
    labels = filter(None, [variant, *(label(change.key, change.value) for change in changes)])
    readable = "_".join(labels)[:NAME_CHARS].rstrip("._-") or "plan"
    everything = canonical([variant, [[change.key, change.value] for change in changes]])
    return f"{readable}-{xxhash.xxh3_64_hexdigest(everything.encode())[:HASH_CHARS]}"


def label(key: str, value: object) -> str:
    """Return the text for a grid value in cell names; for a named component, its name and options."""
    if isinstance(value, Mapping) and "name" in value:
        options = value.get("options", {})
        parts = [value["name"], *(f"{name}-{option}" for name, option in options.items())]
    else:
        parts = [key.rpartition(".")[2], canonical(value)]
    return re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(map(str, parts))).strip("-.")


def describe_setting(cell: Cell) -> str:
    """Return a unique text for everything but the seeds of a cell."""
    values = (f"{key}={canonical(value)}" for key, value in cell.settings.items())
    return " ".join(filter(None, [cell.variant, *values])) or "plan"


def _axes(study: Study, path: Path, text: str) -> list[list[Change]]:
    axes = []
    for key, values in _leaves(study.grid):
        where = ("grid", *key.split("."))
        if not isinstance(values, list) or not values:
            raise ConfigError(f'{path}:{line_of(text, where)}: grid "{key}": give a list of values to run')
        axes.append([Change(key, value, where) for value in values])
    if unknown := sorted(set(study.seeds) - {axis[0].key for axis in axes} - {SEED}):
        raise ConfigError(f"{path}:{line_of(text, ('seeds',))}: seeds: {unknown[0]!r} is not a key of the grid; add it")
    count = math.prod(len(axis) for axis in axes) * max(1, len(study.variant))
    if count > MAX_CELLS:
        raise ConfigError(f"{path}: {count} cells; make the grid smaller, to at most {MAX_CELLS}")
    return axes


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key; the table of a named component is one value."""
    for key, value in table.items():
        if isinstance(value, dict) and value and not isinstance(value.get("name"), str):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _require_no_overwrite(changes: Sequence[Change], path: Path, text: str) -> None:
    """Reject a value that a later one would replace."""
    for later, change in enumerate(changes):
        for earlier in changes[:later]:
            if f"{earlier.key}.".startswith(f"{change.key}."):
                lost = line_of(text, earlier.where, earlier.place)
                line = line_of(text, change.where, change.place)
                raise ConfigError(
                    f'{path}:{line}: "{change.key}" would replace what line {lost} sets; give one of them'
                )


def _plan(base: Table, changes: Sequence[Change], path: Path, text: str, count: int) -> Plan:
    """Return the plan with all changes; an error names the change that causes it."""
    problem, plan = _decode_plan(base, changes, count)
    if plan is not None:
        return plan
    guilty = len(changes)  # the first change after which the problem stays
    while guilty and _decode_plan(base, changes[: guilty - 1], count)[0] == problem:
        guilty -= 1
    if not guilty:
        raise ConfigError(f"{path}:{line_of(text, ('plan',))}: plan: {problem}")
    change = changes[guilty - 1]
    raise ConfigError(f'{path}:{line_of(text, change.where, change.place)}: "{change.key}": {problem}')


def _decode_plan(base: Table, changes: Sequence[Change], count: int) -> tuple[str, Plan | None]:
    try:
        for change in changes:
            base = _set_value(base, change.key.split("."), change.value)
        plan = parse_plan(msgspec.json.encode(base), PLAN)
        check(plan, PLAN)
        if plan.sites and count:
            return "a plan with sites cannot change the number of devices; leave `devices` out", None
        devices(plan, count)
    except ConfigError as error:
        return str(error).removeprefix(f"{PLAN}: "), None
    return "", plan


def _set_value(table: Table, keys: Sequence[str], value: object) -> Table:
    """Return a copy of a table with one value changed."""
    key, *below = keys
    if not below:
        return {**table, key: value}
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{key} is not a table; set it as one value")
    return {**table, key: _set_value(inner, below, value)}
