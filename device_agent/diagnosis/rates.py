"""What two readings of the same counters say about the time between them."""

from __future__ import annotations

from collections.abc import Mapping

from shared.protocol.measurements import Reading

RATES: Mapping[str, tuple[str, float, str]] = {
    "_joules": ("_watts", 1.0, "watts"),
    "_received_bytes": ("_received_bits_per_s", 8.0, "bits_per_s"),
    "_sent_bytes": ("_sent_bits_per_s", 8.0, "bits_per_s"),
    "_count": ("_per_s", 1.0, "per_s"),
}
"""By the ending of a counter's name: the ending of its rate, units of the rate in one of the counter, and the unit."""

BUSY, TOTAL, LOAD = "cputime.busy_seconds", "cputime.total_seconds", "cputime.load_ratio"
COUNTS = frozenset({"throttle.overcurrent_count"})


def rates(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> dict[str, Reading]:
    """Return the mean rates between two readings, by the counters' names with another ending.

    `power.package-0_joules` gives `power.package-0_watts`, `net.eth0_sent_bytes` gives `net.eth0_sent_bits_per_s`;
    busy and total CPU seconds give `cputime.load_ratio`. A counter that went back wrapped or began anew: it gives no
    rate, for nobody knows how far it had come.
    """
    found = {}
    for name in before.keys() & now.keys():
        rate = _renamed(name)
        past_s = now[name].at - before[name].at
        change = now[name].value - before[name].value
        if rate is not None and past_s > 0 and change >= 0:
            new, factor, unit = rate
            found[new] = _mean(now[name], factor * change / past_s, unit)
    return dict(sorted((found | _load(before, now)).items()))


def _renamed(name: str) -> tuple[str, float, str] | None:
    for ending, (new, factor, unit) in RATES.items():
        if name.endswith(ending) and (ending != "_count" or name in COUNTS):
            return name.removesuffix(ending) + new, factor, unit
    return None


def _load(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> dict[str, Reading]:
    if not {BUSY, TOTAL} <= before.keys() & now.keys():
        return {}
    busy = now[BUSY].value - before[BUSY].value
    total = now[TOTAL].value - before[TOTAL].value
    if busy < 0 or total <= 0:
        return {}
    return {LOAD: _mean(now[BUSY], min(1.0, busy / total), "ratio")}  # idle time may go back by a tick (proc(5))


def _mean(counter: Reading, value: float, unit: str) -> Reading:
    return Reading(value=value, unit=unit, source=counter.source, quality=counter.quality, at=counter.at)
