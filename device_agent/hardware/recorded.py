"""Marks in a recorded board for files that did not answer: the file holds `#lack busy` alone."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from shared.errors import NoData
from shared.protocol.measurements import Lack

LACK_MARK = "#lack "
LACK_BY_MARK: dict[str, Lack] = {LACK_MARK + lack: lack for lack in get_args(Lack)}


def parse_recorded(content: str, path: Path) -> str:
    """Return what a file holds; raises NoData where it is recorded not to have answered, with the lack of then."""
    lack = LACK_BY_MARK.get(content.strip()) if content.startswith(LACK_MARK) else None
    if lack is not None:
        raise NoData(f"{path}: recorded as {lack}", lack=lack)
    return content
