"""Link model from recorded throughput traces, outages included."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from edge_server.plan.links import TraceLink
from edge_server.plan.simulated_devices import AfterEnd
from edge_server.replay.devices.components import LinkModel
from edge_server.replay.devices.csv_series import (
    Where,
    average_by_second,
    choose_name,
    read_columns,
    read_series,
    require_valid_series,
)
from edge_server.replay.devices.curve import Curve, steps
from edge_server.replay.devices.given import MEGA
from edge_server.replay.devices.random_draws import draw_within
from shared.errors import ConfigError

HOLD_S = 5.0
"""Time a value holds if no further sample follows; after that the rate is unknown, and nothing passes."""
KEY = "trace"


class LinkSeries(NamedTuple):
    """One direction of a link trace; see `TraceLink`."""

    path: str
    column: str
    where: Where
    name: str
    after: AfterEnd
    scale: float


class RepairedCurve(NamedTuple):
    """Curve of a trace and a warning about repaired gaps; empty if there were none."""

    name: str
    curve: Curve
    warning: str = ""


def trace_link(table: TraceLink, index: int, seed: int, device: str) -> LinkModel:
    """Return the link model of a device.

    Args:
        index: Index in the fleet.

    Raises:
        ConfigError: The trace cannot be used; the message names file, line and remedy.
    """
    header, where = read_columns(table.path), tuple(sorted(table.where.items()))
    up = _load_curve(table, "up", table.up_column or ("ul_mbps" if "ul_mbps" in header else "mbps"), where, index)
    down = _load_curve(table, "down", table.down_column or ("dl_mbps" if "dl_mbps" in header else "mbps"), where, index)
    begin_s = draw_within(table.offset_s, seed, device, "offset_s")
    return LinkModel(
        up=up.curve.later(begin_s),
        down=down.curve.later(begin_s),
        delay_s=table.delay_s,
        loss=table.loss,
        source=f"link trace {up.name}",
        warnings=tuple(dict.fromkeys(curve.warning for curve in (up, down) if curve.warning)),
    )


def _load_curve(table: TraceLink, way: str, column: str, where: Where, index: int) -> RepairedCurve:
    if "direction" in read_columns(table.path) and "direction" not in table.where:
        where = (*where, ("direction", way))
    name = choose_name(table.path, read_series(table.path, KEY, column, where), table.name, index)
    return load_link_curve(LinkSeries(table.path, column, where, name, table.after, table.scale))


@lru_cache(maxsize=1024)
def load_link_curve(source: LinkSeries) -> RepairedCurve:
    """Return one series of a trace, in bit/s.

    Raises:
        ConfigError: The series cannot be used, or is zero throughout.
    """
    path, name = source.path, source.name
    rows = read_series(path, KEY, source.column, source.where)[name]
    require_valid_series(path, name, rows)
    pairs, gaps = fill_gaps(average_by_second(rows))
    if not any(rate for _, rate in pairs):
        raise ConfigError(f"{path}: {name!r}: every rate is zero; name a trace with a positive rate")
    warning = ""
    if gaps:
        warning = (
            f"{path}: {name!r}: {len(gaps)} gaps of more than {HOLD_S:g} s, the longest {max(gaps):g} s; "
            f"the last value holds for {HOLD_S:g} s, then nothing passes"
        )
    end_s = None if len(pairs) < 2 else pairs[-1][0] + min(HOLD_S, pairs[-1][0] - pairs[-2][0])  # noqa: PLR2004
    curve = steps(((t, source.scale * MEGA * rate) for t, rate in pairs), after=source.after, end_s=end_s)
    return RepairedCurve(name, curve, warning)


def fill_gaps(pairs: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], list[float]]:
    """Insert zero rates after `HOLD_S` without a sample; return the steps and the lengths of the gaps in seconds."""
    filled, gaps = [], []
    for (t, rate), (after, _) in pairwise([*pairs, (-math.inf, 0.0)]):
        filled.append((t, rate))
        if after - t > HOLD_S:
            filled.append((t + HOLD_S, 0.0))
            gaps.append(after - t)
    return filled, gaps
