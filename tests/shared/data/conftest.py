"""Where the recorded data sets are, and a short way to expect a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """Return the path of a recorded data set's file or folder, or skip the test."""
    base = ROOT / os.environ.get("FIELDFLEET_DATA", "../shared/data")

    def find(name: str) -> str:
        path = base / name
        if not path.exists():
            pytest.skip(f"{path} is absent; set FIELDFLEET_DATA to the folder of data sets")
        return str(path)

    return find


@pytest.fixture
def refused() -> Callable[..., str]:
    """Return the message with which `load` refuses a spec."""

    def message(**fields: object) -> str:
        with pytest.raises(ConfigError) as caught:
            load(Data(**fields))
        return str(caught.value)

    return message
