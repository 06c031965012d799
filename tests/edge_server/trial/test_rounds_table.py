"""Columns of the table of rounds for small and large fleets."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.journal.records import Evaluated, RoundClosed
from edge_server.trial.tables import MAX_DEVICE_COLUMNS, rounds_table, slowest_device
from shared.protocol.measurements import Cost
from shared.runtime.text_table import fits_width


def closed(number: int, count: int) -> RoundClosed:
    """Return a round in which device i uploaded i kB and downloaded 1 kB more."""
    names = [f"board-{index:04}" for index in range(1, count + 1)]
    up = {name: index * 1000 for index, name in enumerate(names, 1)}
    down = {name: value + 1000 for name, value in up.items()}
    return RoundClosed(round=number, outcome="aggregated", arrived=names, seconds=1.0, bytes_up=up, bytes_down=down)


def headings(count: int, *, each_device: bool = False) -> list[str]:
    return [column.heading for column in rounds_table([closed(1, count)], each_device=each_device).columns]


def test_up_to_eight_devices_have_a_column_each():
    assert headings(MAX_DEVICE_COLUMNS)[-8:] == [f"board-{index:04}" for index in range(1, 9)]


@pytest.mark.parametrize("count", [9, 50, 1000])
def test_more_devices_are_summarized(count):
    """Least, median and most bytes of a device; the row fits a usual terminal however many devices there are."""
    table = rounds_table([closed(1, count)])
    assert [column.heading for column in table.columns][-3:] == ["min", "median", "max"]
    middle = (count + 1) / 2 * 1000
    cells = [tuple(float(part) for part in cell.split("/")) for cell in table.rows[0][-3:]]
    scale = 1000 if "kB" in str(table.caption) else 1e6
    expected = [(2000, 1000), (middle + 1000, middle), (count * 1000 + 1000, count * 1000)]
    for (down, up), (down_bytes, up_bytes) in zip(cells, expected, strict=True):
        assert down * scale == pytest.approx(down_bytes, abs=0.051 * scale)
        assert up * scale == pytest.approx(up_bytes, abs=0.051 * scale)
    assert f"{count} devices" in str(table.caption)
    assert fits_width(table, 120)


def test_each_device_has_a_column_where_asked_for():
    assert len(headings(50, each_device=True)) == len(headings(8)) + 42


def test_without_test_data_of_the_server_a_round_shows_its_model_on_the_devices():
    """As all devices measured it, else those of the next round, which begins with it; a missed one has none."""
    rounds = [closed(number, 2) for number in (1, 2, 3, 4)]
    rounds[1] = msgspec.structs.replace(rounds[1], device_accuracy=0.25)
    rounds[2] = msgspec.structs.replace(rounds[2], device_accuracy=0.5)
    evaluated = [Evaluated(round=number, accuracy=value, by_device={}) for number, value in ((2, 0.75), (4, 0.875))]
    table = rounds_table([*rounds, *evaluated])
    index = [column.heading for column in table.columns].index("accuracy\non devices")
    assert [row[index] for row in table.rows] == ["0.2500", "0.7500", "-", "0.8750"]
    tested = [msgspec.structs.replace(rounds[0], accuracy=0.1), *rounds[1:]]
    assert [row[index] for row in rounds_table([*tested, *evaluated]).rows] == ["0.1000", "-", "-", "-"]


def test_the_slowest_device_is_named():
    """By the sum of its parts; devices that report no seconds are left out."""
    costs = {
        "a": Cost(compute_s=3.0, upload_s=1.0),
        "b": Cost(compute_s=1.0, upload_s=4.0),
        "c": Cost(),
    }
    assert slowest_device(costs) == "b"
    assert slowest_device({"c": Cost()}) == "-"
    assert slowest_device({}) == "-"
