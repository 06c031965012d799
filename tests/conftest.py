"""What tests of every part may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import Disk, mounted

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of recorded data sets, or skip the test where there is none."""
    folder = ROOT / os.environ.get("FIELDFLEET_DATA", "../shared/data")
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; set FIELDFLEET_DATA to the folder of data sets")
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a disk of 4 MiB for the test."""
    with mounted(tmp_path / "disk") as small:
        yield small
