"""Read a TOML file (or JSON, by its suffix) into a typed struct; a mistake is one line with file, key and remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import ConfigError

T = TypeVar("T")

MAX_BYTES = 1 << 20
"""A longer file is none of ours, and is not read to its end."""

_DEEP_KEY = re.compile(r"(?:\.[^.\n]++){64}")
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
        data: What the file holds, UTF-8.
        kind: The struct.
        path: Where the file is; its suffix says whether it is JSON, and errors name it.

    Raises:
        ConfigError: They are too long or not TOML (JSON, by its suffix); a key is unknown, missing or of a wrong type.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes; give the path of a configuration")
    try:
        return _decode(data.decode(), kind, is_json=path.suffix == ".json")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); fix the file") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_remedy(one_line(error), kind)}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {one_line(error)}; correct that line") from error
    except RecursionError:
        raise ConfigError(f"{path}: arrays or tables within one another beyond all measure; flatten them") from None
    except OverflowError:
        raise ConfigError(f"{path}: an integer of more than 64 bits; make it smaller") from None


def _decode(text: str, kind: type[T], *, is_json: bool) -> T:
    value: T
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


def one_line(error: Exception) -> str:
    """Return what it says, with what a terminal would not print as it is, written out: keys may hold anything."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(error))


def _remedy(error: str, kind: type) -> str:
    """Rephrase msgspec's `Expected X, got Y - at `$.key`` with the key first and what to do last."""
    problem, _, place = error.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".") or "top level"
    if "unknown field" in problem:
        return f"{key}: {problem}; remove it or correct its spelling{_known(key, kind)}"
    if "missing required field" in problem:
        return f"{key}: {problem}; add it"
    return f"{key}: {problem}; correct the value"


def _known(key: str, kind: type) -> str:
    if key != "top level":
        return ""
    return f" (known: {', '.join(field.encode_name for field in msgspec.structs.fields(kind))})"
