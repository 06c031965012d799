"""Two cores are enough for these tests, and one is enough for torch."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread(one_thread: None) -> None:
    """Have every test here compute on one thread."""
