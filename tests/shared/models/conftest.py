"""Networks so small that a second thread of torch only waits for the first."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread(one_thread: None) -> None:
    """Have every test here compute on one thread."""
