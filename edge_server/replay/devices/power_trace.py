"""Energy model from a recorded power curve."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import msgspec

from edge_server.plan.simulated_devices import TracePower
from edge_server.replay.devices.behaviour import Direction
from edge_server.replay.devices.components import EnergyModel
from edge_server.replay.devices.csv_series import average_by_second, choose_name, read_series, require_valid_series
from edge_server.replay.devices.curve import Curve, steps
from shared.errors import ConfigError

LONGEST_GAP_S = 5.0


def trace_power(table: TracePower, index: int) -> EnergyModel:
    """Return the energy model of a device; every task and transfer starts at the curve's start.

    Raises:
        ConfigError: A curve cannot be used; the message names file, line and remedy.
    """
    name, busy = _named_curve(table, table.name, index)
    radio = {
        way: _named_curve(table, name, index)[1]
        for way, name in (("up", table.tx_name), ("down", table.rx_name))
        if name
    }

    def transfer(way: Direction, t0: float, t1: float) -> float | None:
        return radio[way].integral(0.0, t1 - t0) if way in radio else None

    return EnergyModel(
        charge=lambda work: busy.integral(0.0, work.seconds),
        idle_w=table.idle_w,
        radio=transfer,
        source=f"power trace {name}",
    )


def _named_curve(table: TracePower, name: str, index: int) -> tuple[str, Curve]:
    name = choose_name(table.path, read_series(table.path, table.key_column, table.column), name, index)
    return name, load_power_curve(msgspec.structs.replace(table, name=name)).later(table.offset_s)


@lru_cache(maxsize=1024)
def load_power_curve(table: TracePower) -> Curve:
    """Return the curve that a table names, in watts.

    Raises:
        ConfigError: The curve cannot be used, or has a gap, in which the power is unknown but not zero.
    """
    path, name = table.path, table.name
    rows = read_series(path, table.key_column, table.column)[name]
    require_valid_series(path, name, rows)
    pairs = average_by_second(rows)
    for (before, _), (after, _) in pairwise(pairs):
        if after - before > LONGEST_GAP_S:
            raise ConfigError(f"{path}: {name!r}: no sample from {before:g} s to {after:g} s; name another curve")
    return steps(((t, table.scale * value) for t, value in pairs), after=table.after)
