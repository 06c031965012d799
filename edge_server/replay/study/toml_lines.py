"""Line number of a key in a TOML file, for error messages."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def line_of(text: str, key_parts: tuple[str, ...], place: int = 0) -> int:
    """Return the line number, from 1, of a key or of the table that holds it; 1 if there is none.

    Args:
        key_parts: Parts of the dotted key, table first; dots within quotes also separate parts.
        place: Index among several tables `[[...]]` of the first part.
    """
    best, best_line, count = 0, 1, -1
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        path: tuple[str, ...] = ()
        if header := _HEADER.match(line):
            table = path = _parts(header[2])
            count += header[1] == "[[" and table == key_parts[:1]
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
        in_place = count in (-1, place) or path[:1] != key_parts[:1]
        if in_place and best < len(path) <= len(key_parts) and path == key_parts[: len(path)]:
            best, best_line = len(path), number
    return best_line


def _parts(key: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.sub("[\"']", "", key).split("."))
