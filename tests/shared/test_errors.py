"""Messages with a remedy are split at their last semicolon."""

from __future__ import annotations

import pytest

from shared.errors import split_remedy


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("a is 1; use 2", ("a is 1", "use 2")),
        ("a is 1; b is 2; use 3", ("a is 1; b is 2", "use 3")),
        ("a is 1", ("a is 1", "")),
        ("a;b", ("a;b", "")),
    ],
)
def test_problem_and_remedy(message, expected):
    assert split_remedy(message) == expected
