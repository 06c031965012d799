"""Figures get the unit that a person would write."""

from __future__ import annotations

import pytest

from shared.protocol.unit import decimal_units
from shared.protocol.units import BINARY_BYTES, BYTES, JOULES, SECONDS, choose_unit


@pytest.mark.parametrize(
    ("value", "units", "name"),
    [
        (0.0, SECONDS, "ms"),
        (0.1, SECONDS, "s"),
        (119.9, SECONDS, "s"),
        (120.0, SECONDS, "min"),
        (7200.0, SECONDS, "h"),
        (2 * 86_400.0, SECONDS, "d"),
        (0.05, JOULES, "mJ"),
        (-2e6, JOULES, "MJ"),
        (999.0, BYTES, "B"),
        (1000.0, BYTES, "kB"),
        (1000.0, BINARY_BYTES, "B"),
        (2.0**20, BINARY_BYTES, "MiB"),
        (1.5e9, decimal_units("Hz"), "GHz"),
    ],
)
def test_the_largest_unit_that_a_figure_reaches(value, units, name) -> None:
    assert choose_unit(value, units).name == name


@pytest.mark.parametrize(("value", "name"), [(0.0, "kB"), (5e6, "MB"), (5e12, "MB")])
def test_only_among_the_units_that_are_named(value, name) -> None:
    assert choose_unit(value, BYTES, between=("MB", "kB")).name == name
