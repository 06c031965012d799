"""How a recorded board says that something was there and did not answer: a file that holds `#lack busy` alone."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from shared.errors import NoData
from shared.protocol.measurements import Lack

MARK = "#lack "
MARKS: dict[str, Lack] = {MARK + lack: lack for lack in get_args(Lack)}


def checked(content: str, path: Path) -> str:
    """Return what a file holds; raises NoData where it is recorded not to have answered, with the lack of then."""
    lack = MARKS.get(content.strip()) if content.startswith(MARK) else None
    if lack is not None:
        raise NoData(f"{path}: recorded as {lack}", lack=lack)
    return content
