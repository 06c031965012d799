"""Plans from a file, a dict or keywords, validated as `edge-server` validates a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any, TypeAlias

import msgspec

from edge_server.plan.data_folder import default_data_root
from edge_server.plan.plan import Plan
from edge_server.plan.removed_keys import convert_plan
from edge_server.rounds.check_plan import load, validate
from shared import registry
from shared.config import parse, read_bytes
from shared.errors import ConfigError

PlanSource: TypeAlias = "Plan | str | os.PathLike[str] | Mapping[str, Any]"
CHOICES = ("name", "source", "kind")
"""Keys that choose what a table is about: options of another choice would not fit."""
NAME = Path("plan")
"""Name of a plan without a file, in errors."""


def plan(
    source: PlanSource | None = None,
    /,
    *,
    data_root: str | os.PathLike[str] | None = None,
    allow: Iterable[str] = (),
    **keys: Any,
) -> Plan:
    """Return a checked plan; relative paths of data are resolved against `data_root`.

    A function in the place of a name, as in `model={"name": build}`, stands for its `module:function` and is allowed.

    Args:
        source: Plan file, its tables as dicts, or another plan.
        data_root: Folder of data sets; None for FIELDFLEET_DATA or its default.
        allow: Plugins that plans may name, such as `module:function` or `module:*`, besides those of
            FIELDFLEET_PLUGINS.
        keys: Keys of a plan, instead of those of `source`. Tables are merged, unless they choose another `name`,
            `source` or `kind`; lists are replaced.

    Raises:
        ConfigError: The plan is invalid, with the messages that a file would get.
    """
    root = default_data_root() if data_root is None else Path(data_root)
    named: list[str] = []
    table, path = _read_table(source, named)
    changes = _to_tables(keys, named)
    allow_plugins([*allow, *named])
    if isinstance(source, str | os.PathLike) and not keys:
        return load(path, root, several_sites=True)
    return validate(convert_plan(_merge(table, changes), path), path, root)


def _read_table(source: PlanSource | None, named: list[str]) -> tuple[dict[str, Any], Path]:
    """Return the tables of a plan and its name for errors.

    Args:
        named: Receives the names of functions in it.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return parse(read_bytes(path), dict[str, Any], path), path
    return _to_tables({} if source is None else source, named), NAME


def _to_tables(value: Plan | Mapping[str, Any], named: list[str]) -> dict[str, Any]:
    """Return a plan as dicts, lists and simple values.

    Raises:
        ConfigError: A value is of a type that no file could hold.
    """

    def simplify(part: object) -> object:
        if isinstance(part, FunctionType):
            if not part.__qualname__.isidentifier():
                raise TypeError(f"{part.__qualname__} has no name in its module; use a function of the top level")
            named.append(f"{part.__module__}:{part.__qualname__}")
            return named[-1]
        if isinstance(part, PurePath):
            return str(part)
        if hasattr(part, "item"):  # a number of numpy or torch
            return part.item()
        raise TypeError(f"a plan holds texts, numbers, lists and dicts, not {type(part).__name__}")

    try:
        tables = msgspec.to_builtins(value, enc_hook=simplify, str_keys=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{NAME}: {error}; correct the value") from error
    if not isinstance(tables, dict):
        raise ConfigError(f"{NAME}: a plan is a dict, not {type(value).__name__}; give a file, a dict or keywords")
    return tables


def _merge(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with changed keys; inner tables are merged unless they choose something else."""
    merged = dict(table)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and not _chooses_another(below, value):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _chooses_another(table: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    return any(table.get(name) != changes[name] for name in CHOICES if name in changes)


def allow_plugins(entries: Iterable[str] = ()) -> None:
    """Add to the plugins that plans may name in this process: those of FIELDFLEET_PLUGINS, and `entries`.

    Raises:
        ConfigError: An entry is none that `shared.registry.allow` takes.
    """
    registry.allow({*registry.allowed_entries(), *registry.entries_of_environment(), *entries})
