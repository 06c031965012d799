"""Small boards of our own making: files below a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from device_agent.profile.schema import Profile


def grow(root: Path, files: Mapping[str, object]) -> Path:
    """Write files by their path below `root`; return `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def profile(**tables: object) -> Profile:
    return Profile(schema=1, id="board", name="Board", **tables)  # type: ignore[arg-type]
