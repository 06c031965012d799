"""Read a TOML file (or JSON, by its suffix) into a typed struct; a mistake is one line with file, key and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import ConfigError

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T:
    """Return the file's contents as `kind`.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML (JSON); a key is unknown, missing or of a wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of an existing TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); fix the file or its permissions") from error
    try:
        return _decode(text, kind, is_json=path.suffix == ".json")
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_remedy(str(error), kind)}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; correct that line") from error


def _decode(text: str, kind: type[T], *, is_json: bool) -> T:
    if is_json:
        return msgspec.json.decode(text, type=kind)
    value: T = msgspec.toml.decode(text, type=kind)
    return value


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
