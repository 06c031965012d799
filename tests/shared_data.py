"""Recorded data beside the checkout, read where it lies; tests that need it are skipped where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("FIELDFLEET_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def shared(*parts: str) -> Path:
    """Return a file or folder of the recorded data; skips the test where there is none."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no recorded data at {path}: name its folder in FIELDFLEET_SHARED")
    return path
