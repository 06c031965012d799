"""A board that hangs a probe ends its test, and not the whole run."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

HANG_S = 300


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Raise in a test that takes a minute; one that tries many boards sets the alarm again for each."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no end after {HANG_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
