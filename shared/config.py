"""Read a TOML or JSON configuration file into a typed struct, reporting all mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from shared.config_faults import DATES, find_faults
from shared.errors import ConfigError
from shared.spelling import guess

T = TypeVar("T")

MAX_BYTES = 1 << 20
"""Size limit; a longer file is not a configuration, and is not read to its end."""

_TOO_DEEP = "arrays or tables are nested too deeply; flatten them"
_TOO_LONG = "an integer has more than 64 bits; make it smaller"
_DEEP_KEY = re.compile(r"(?:\.[^.\n]+){64}")
"""A dotted key of so many parts: the parser's time and memory grow with their square, also for ignored keys."""


def read(path: Path, kind: type[T]) -> T:
    """Read a file as `kind`.

    Raises:
        ConfigError: The file is missing, unreadable or invalid.
    """
    return parse(read_bytes(path), kind, path)


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file for `parse`, up to one byte beyond the size limit.

    Raises:
        ConfigError: The file is missing or unreadable.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of an existing TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); fix the file or its permissions") from error


def parse(data: bytes, kind: type[T], path: Path) -> T:
    """Parse the contents of a file into a typed struct.

    Args:
        data: UTF-8, optionally with a byte order mark, as Windows writes it.
        path: File name, for errors; the suffix `.json` selects JSON.

    Raises:
        ConfigError: The data are too long or not TOML (JSON, by suffix); keys are unknown, missing or of a wrong type,
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
        raise _describe_faults(error, _decode_untyped(text, is_json=is_json), kind, path) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {escape_unprintable(error)}; correct that line") from error
    except RecursionError:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from None
    except OverflowError:
        raise ConfigError(f"{path}: {_TOO_LONG}") from None
    return value


def convert(value: Any, kind: type[T], path: Path) -> T:
    """Convert a decoded file, or the same tables made in Python, into a typed struct, with the errors of `parse`.

    Args:
        value: Dicts, lists, texts, numbers.
        path: Name of the value, for errors.

    Raises:
        ConfigError: Keys are unknown, missing or of a wrong type, one line for each.
    """
    try:
        converted = msgspec.convert(value, kind, builtin_types=DATES, str_keys=True)
        msgspec.msgpack.encode(value)  # raises OverflowError for an integer that cannot be sent
    except msgspec.ValidationError as error:
        raise _describe_faults(error, value, kind, path) from error
    except RecursionError:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from None
    except OverflowError:
        raise ConfigError(f"{path}: {_TOO_LONG}") from None
    return converted


def _describe_faults(error: msgspec.ValidationError, value: Any, kind: type, path: Path) -> ConfigError:
    """Return the error that names every fault of a value; the first alone where the value is None."""
    faults = (value is not None and find_faults(value, kind)) or [str(error)]
    lines = [f"{path}: {_rephrase(escape_unprintable(fault), kind, value)}" for fault in faults]
    return ConfigError("\n".join(lines))


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
        except ValueError:  # the interpreter's limit on digits
            raise OverflowError from None
    msgspec.msgpack.encode(value)  # raises OverflowError for an integer that cannot be sent
    return value


def _decode_untyped(text: str, *, is_json: bool) -> Any:
    """Return the tables of a file; None where they cannot be decoded."""
    try:
        return _decode(text, Any, is_json=is_json)
    except (msgspec.MsgspecError, RecursionError, OverflowError):
        return None


def escape_unprintable(error: object) -> str:
    """Escape unprintable characters: keys may hold anything."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(error))


def _rephrase(error: str, kind: type, value: Any) -> str:
    """Rephrase msgspec's `Expected X, got Y - at `$.key`` with the key first and the remedy last."""
    problem, _, place = error.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".") or "top level"
    if "unknown field" in problem:
        keys = _known_keys("" if key == "top level" else key, kind, value)
        named = f" (known: {', '.join(keys)})" if keys else ""
        hint = guess(problem.partition("`")[2].rstrip("`"), keys, "`")
        return f"{key}: {problem}; remove it or correct its spelling{named}{hint}"
    if "missing required field" in problem:
        return f"{key}: {problem}; add it"
    if "enum value" in problem:
        allowed = [str(literal) or "''" for node in _types_at(key, kind) for literal in _literals(node)]
        return f"{key}: {problem}; correct the value: use {' or '.join(allowed)}" if allowed else f"{key}: {problem}"
    return f"{key}: {problem}" if "; " in problem else f"{key}: {problem}; correct the value"


def _known_keys(place: str, kind: type, value: Any) -> list[str]:
    """Return the keys of the table at a place such as `device[0].link`; empty if unknown."""
    tables = [node for node in _types_at(place, kind) if isinstance(node, inspect.StructType)]
    if len(tables) > 1:  # a tagged union: the table's tag selects the struct
        content = _table_at(place, value)
        tables = [table for table in tables if content.get(table.tag_field or "") == table.tag]
    tags = [table.tag_field for table in tables[:1] if table.tag_field]
    return [*tags, *(field.encode_name for table in tables[:1] for field in table.fields)]


def _types_at(place: str, kind: type) -> list[inspect.Type]:
    """Return the possible types of the value at a place."""
    nodes = [inspect.type_info(kind)]
    for part in re.findall(r"[^.\[\]]+", place):
        nodes = [inner for node in _without_unions(nodes) for inner in _inner_types(node, part)]
    return list(_without_unions(nodes))


def _literals(node: inspect.Type) -> Sequence[object]:
    """Return the values that a type allows; empty if it allows any."""
    return node.values if isinstance(node, inspect.LiteralType) else ()


def _without_unions(types: list[inspect.Type]) -> Iterator[inspect.Type]:
    for node in types:
        yield from _without_unions(list(node.types)) if isinstance(node, inspect.UnionType) else (node,)


def _inner_types(node: inspect.Type, part: str) -> Iterator[inspect.Type]:
    """Yield the possible types of a part: a struct's field, an entry of an array or of a table."""
    if isinstance(node, inspect.StructType):
        yield from (field.type for field in node.fields if field.encode_name == part)
    elif isinstance(node, inspect.DictType):
        yield node.value_type
    elif isinstance(node, inspect.CollectionType):
        yield node.item_type


def _table_at(place: str, value: Any) -> dict[str, Any]:
    for part in re.findall(r"[^.\[\]]+", place):
        value = value[int(part)] if isinstance(value, list) else value.get(part, {})
    return value if isinstance(value, dict) else {}
