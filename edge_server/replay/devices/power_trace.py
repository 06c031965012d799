"""A recorded power curve, as watts over the time in which a device computes or sends."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import msgspec

from edge_server.plan.simulated_devices import TracePower
from edge_server.replay.devices.behaviour import Direction
from edge_server.replay.devices.components import Draw
from edge_server.replay.devices.csv_series import choose_name, mean_by_moment, require_possible, series
from edge_server.replay.devices.curve import Curve, steps
from shared.errors import ConfigError

LONGEST_GAP_S = 5.0


def draw(table: TracePower, index: int) -> Draw:
    """Return what the `index`-th device of a plan draws: every task and every transfer begins at the curve's begin.

    Raises:
        ConfigError: A curve cannot be used; the message names file, line and remedy.
    """
    name, busy = _watts(table, table.name, index)
    radio = {
        way: _watts(table, name, index)[1] for way, name in (("up", table.tx_name), ("down", table.rx_name)) if name
    }

    def transfer(way: Direction, t0: float, t1: float) -> float | None:
        return radio[way].integral(0.0, t1 - t0) if way in radio else None

    return Draw(
        charge=lambda work: busy.integral(0.0, work.seconds),
        idle_w=table.idle_w,
        radio=transfer,
        source=f"power trace {name}",
    )


def _watts(table: TracePower, name: str, index: int) -> tuple[str, Curve]:
    name = choose_name(table.path, series(table.path, table.key_column, table.column), name, index)
    return name, recorded(msgspec.structs.replace(table, name=name)).later(table.offset_s)


@lru_cache(maxsize=1024)
def recorded(table: TracePower) -> Curve:
    """Return the curve that a table names, in watts.

    Raises:
        ConfigError: It cannot be used, or has a gap: nobody knows what was drawn then, and it was not nothing.
    """
    path, name = table.path, table.name
    rows = series(path, table.key_column, table.column)[name]
    require_possible(path, name, rows)
    pairs = mean_by_moment(rows)
    for (before, _), (after, _) in pairwise(pairs):
        if after - before > LONGEST_GAP_S:
            raise ConfigError(
                f"{path}: {name!r}: {after - before:g} s from {before:g} s on without a sample; name another curve"
            )
    return steps(((t, table.scale * value) for t, value in pairs), after=table.after)
