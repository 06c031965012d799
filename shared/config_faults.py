"""All faults of a configuration with their places; msgspec reports only the first."""

from __future__ import annotations

import datetime as dt
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

MAX_FAULTS = 50
"""Limit of the list: a file with more faults is not such a configuration."""
DATES = (dt.datetime, dt.date, dt.time)
"""Types of TOML values beside those of JSON."""


def find_faults(value: object, kind: type) -> list[str]:
    """Find the faults of a decoded TOML or JSON value, each in msgspec's form: `problem - at `$.place``."""
    return [fault for fault, _ in zip(_faults(value, kind, ""), range(MAX_FAULTS), strict=False)]


def _faults(value: object, kind: Any, place: str) -> Iterator[str]:
    """Yield the faults of a value's parts, or else its own fault."""
    try:
        msgspec.convert(value, kind, builtin_types=DATES, str_keys=True)
    except msgspec.ValidationError as error:
        has_inner = False
        for fault in _faults_of_parts(value, _select_type(kind, value), place):
            has_inner = True
            yield fault
        if not has_inner:
            yield _prefix_place(str(error), place)


def _faults_of_parts(value: object, kind: Any, place: str) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        yield from _faults_of_struct(value, kind, place)
    elif get_origin(kind) in (list, tuple) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, get_args(kind)[0], f"{place}[{index}]")
    elif get_origin(kind) is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _faults(item, get_args(kind)[1], f"{place}.{key}")


def _faults_of_struct(value: dict[str, object], kind: type[msgspec.Struct], place: str) -> Iterator[str]:
    hints, fields = _hints(kind), {field.encode_name: field for field in msgspec.structs.fields(kind)}
    config = kind.__struct_config__
    for key, item in value.items():
        if key in fields:
            yield from _faults(item, hints[fields[key].name], f"{place}.{key}")
        elif config.forbid_unknown_fields and key != config.tag_field:
            yield f"Object contains unknown field `{key}`{_at(place)}"
    for key, field in fields.items():
        if field.required and key not in value:
            yield f"Object missing required field `{key}`{_at(place)}"


def _select_type(kind: Any, value: object) -> Any:
    """Select the type of a union that a value is meant to have: the one beside None, or the struct of its tag."""
    if not isinstance(kind, types.UnionType):
        return kind
    others = [option for option in get_args(kind) if option is not types.NoneType]
    if len(others) > 1 and isinstance(value, dict):
        others = [option for option in others if _has_tag(option, value)]
    return others[0] if len(others) == 1 else kind


def _has_tag(kind: Any, value: dict[str, object]) -> bool:
    config = getattr(kind, "__struct_config__", None)
    return config is not None and config.tag is not None and value.get(config.tag_field) == config.tag


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _prefix_place(error: str, place: str) -> str:
    """Prefix the place in msgspec's message with that of the enclosing value."""
    problem, _, inner = error.partition(" - at ")
    return problem + _at(place + inner.strip("`").removeprefix("$"))


def _at(place: str) -> str:
    return f" - at `${place}`" if place else ""
