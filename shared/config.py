"""Read a TOML file (or JSON, by its suffix) into a typed struct; each mistake is one line with file, key and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from shared.config_faults import find_faults
from shared.errors import ConfigError
from shared.spelling import guess

T = TypeVar("T")

MAX_BYTES = 1 << 20
"""A longer file is none of ours, and is not read to its end."""

_DEEP_KEY = re.compile(r"(?:\.[^.\n]+){64}")
"""A dotted key of so many parts; the parser's time and memory grow with their square, also where it ignores them."""


def read(path: Path, kind: type[T]) -> T:
    """Return the file's contents as `kind`.

    Raises:
        ConfigError: The file is missing or unreadable, or as `parse`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of an existing TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); fix the file or its permissions") from error
    return parse(data, kind, path)


def parse(data: bytes, kind: type[T], path: Path) -> T:
    """Parse the contents of a file into a typed struct.

    Args:
        data: What the file holds, UTF-8; a byte order mark, as Windows writes it, is passed over.
        path: Where the file is; its suffix says whether it is JSON, and errors name it.

    Raises:
        ConfigError: They are too long or not TOML (JSON, by its suffix); keys are unknown, missing or of a wrong type,
            one line for each.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes; give the path of a configuration")
    try:
        text, is_json = data.decode("utf-8-sig"), path.suffix == ".json"
        value: T = _decode(text, kind, is_json=is_json)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); save it as UTF-8") from error
    except msgspec.ValidationError as error:
        faults = _all_faults(text, kind, is_json=is_json) or [str(error)]
        lines = [f"{path}: {_remedy(one_line(fault), kind, text, is_json=is_json)}" for fault in faults]
        raise ConfigError("\n".join(lines)) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {one_line(error)}; correct that line") from error
    except RecursionError:
        raise ConfigError(f"{path}: arrays or tables within one another beyond all measure; flatten them") from None
    except OverflowError:
        raise ConfigError(f"{path}: an integer of more than 64 bits; make it smaller") from None
    return value


def _decode(text: str, kind: Any, *, is_json: bool) -> Any:
    if is_json:
        value = msgspec.json.decode(text, type=kind)
    elif _DEEP_KEY.search(text):
        raise msgspec.DecodeError("a key of more than 64 parts")
    else:
        try:
            value = msgspec.toml.decode(text, type=kind)
        except msgspec.MsgspecError:
            raise
        except ValueError:  # the interpreter's own limit on digits
            raise OverflowError from None
    msgspec.msgpack.encode(value)  # raises OverflowError: such an integer could not be told to anybody
    return value


def _all_faults(text: str, kind: type, *, is_json: bool) -> list[str]:
    """Return every fault of the file; none where it is not even plain data."""
    try:
        value: Any = _decode(text, Any, is_json=is_json)
    except (msgspec.MsgspecError, RecursionError, OverflowError):
        return []
    return find_faults(value, kind)


def one_line(error: object) -> str:
    """Return what it says, with what a terminal would not print as it is, written out: keys may hold anything."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(error))


def _remedy(error: str, kind: type, text: str, *, is_json: bool) -> str:
    """Rephrase msgspec's `Expected X, got Y - at `$.key`` with the key first and what to do last."""
    problem, _, place = error.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".") or "top level"
    if "unknown field" in problem:
        known = _known_keys("" if key == "top level" else key, kind, text, is_json=is_json)
        named = f" (known: {', '.join(known)})" if known else ""
        meant = guess(problem.partition("`")[2].rstrip("`"), known, "`")
        return f"{key}: {problem}; remove it or correct its spelling{named}{meant}"
    if "missing required field" in problem:
        return f"{key}: {problem}; add it"
    if "enum value" in problem:
        allowed = [str(value) or "''" for one in _types_at(key, kind) for value in _literals(one)]
        return f"{key}: {problem}; correct the value: use {' or '.join(allowed)}" if allowed else f"{key}: {problem}"
    return f"{key}: {problem}; correct the value"


def _known_keys(place: str, kind: type, text: str, *, is_json: bool) -> list[str]:
    """Return the keys of the table at a place such as `device[0].link`; empty where nobody knows them."""
    tables = [one for one in _types_at(place, kind) if isinstance(one, inspect.StructType)]
    if len(tables) > 1:  # the table says which of them it is
        told = _table_at(place, _decode(text, dict[str, Any], is_json=is_json))
        tables = [one for one in tables if told.get(one.tag_field or "") == one.tag]
    tags = [one.tag_field for one in tables[:1] if one.tag_field]
    return [*tags, *(field.encode_name for one in tables[:1] for field in one.fields)]


def _types_at(place: str, kind: type) -> list[inspect.Type]:
    """Return the types that the value at a place may have."""
    found = [inspect.type_info(kind)]
    for part in re.findall(r"[^.\[\]]+", place):
        found = [inner for one in _without_unions(found) for inner in _parts_of(one, part)]
    return list(_without_unions(found))


def _literals(one: inspect.Type) -> Sequence[object]:
    """Return the values that a type allows; none where it allows any."""
    return one.values if isinstance(one, inspect.LiteralType) else ()


def _without_unions(types: list[inspect.Type]) -> Iterator[inspect.Type]:
    for one in types:
        yield from _without_unions(list(one.types)) if isinstance(one, inspect.UnionType) else (one,)


def _parts_of(one: inspect.Type, part: str) -> Iterator[inspect.Type]:
    """Yield what type a part of a value may have: a struct's field, an entry of an array or of a table."""
    if isinstance(one, inspect.StructType):
        yield from (field.type for field in one.fields if field.encode_name == part)
    elif isinstance(one, inspect.DictType):
        yield one.value_type
    elif isinstance(one, inspect.CollectionType):
        yield one.item_type


def _table_at(place: str, value: Any) -> dict[str, Any]:
    for part in re.findall(r"[^.\[\]]+", place):
        value = value[int(part)] if isinstance(value, list) else value.get(part, {})
    return value if isinstance(value, dict) else {}
