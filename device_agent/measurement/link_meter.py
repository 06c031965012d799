"""Meter of the link to the broker, from the transfers that the agent makes anyway.

What counts is goodput: bytes of TCP's payload that the other end has, in the seconds in which the link was busy with
them. The rate that a radio announces does not enter: it is that of its last frame, and an idle one announces its
lowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from device_agent.measurement.link_rate import MIN_HAUL_BYTES, MIN_HAUL_S, Haul, Way, estimate
from device_agent.probes.base import ProbeResult
from shared.protocol.measurements import Absent, Reading
from shared.runtime.clock import Clock, monotonic
from shared.transport.tcp_info import Counts, Traffic


def measure_haul(before: Counts, after: Counts) -> tuple[int, float]:
    """Return bytes and busy seconds of the way up between two counts of one connection, its round trip removed.

    The kernel's busy time ends with the last byte's acknowledgement, a round trip after a link that was idle at first
    began. Where the kernel counts none, the clock does, up to when the last byte had left.
    """
    if before.busy_s is not None and after.busy_s is not None:
        seconds = after.busy_s - before.busy_s
    else:
        seconds = after.at - before.at - after.quiet_s
    return after.acked_bytes - before.acked_bytes, max(0.0, seconds - after.min_rtt_s * before.is_idle)


@dataclass
class LinkMeter:
    """Meter of both ways of the link; whoever transfers says when. Has no figures where the kernel counts nothing.

    Attributes:
        traffic: What passes the agent's connection.
        clock: Monotonic seconds.
    """

    traffic: Traffic = field(default_factory=Traffic)
    clock: Clock = monotonic
    up: Way = field(default_factory=lambda: Way("up"))
    down: Way = field(default_factory=lambda: Way("down"))
    _last: Counts | None = None
    _sent_bytes: int = 0
    _sending_s: float = 0.0
    _address: str = ""
    _is_paced: bool = False

    def __post_init__(self) -> None:
        """Have arrivals timed from now on."""
        self.traffic.watched = True

    def uploading(self) -> None:
        """Note that the server asks for frames: what has passed since it last did counts, on the same connection."""
        last, self._last = self._last, self._count()
        if last and self._last and last.connection == self._last.connection:
            sent_bytes, seconds = measure_haul(last, self._last)
            self._sent_bytes += sent_bytes
            self._sending_s += seconds

    def uploaded(self) -> None:
        """Note that the server has all it asked for."""
        if self._last:
            is_told = not self._is_paced or self._last.busy_s is not None  # pauses of ours are no time of the link
            self.uploading()
            if is_told:
                self.up.add(Haul(self._sent_bytes, self._sending_s, self.clock()))
        self._last, self._sent_bytes, self._sending_s, self._is_paced = None, 0, 0.0, False

    def paced(self) -> None:
        """Note that what goes next was held back here: it begins on a link that may have become idle meanwhile.

        Only a kernel that counts busy seconds tells the rate then.
        """
        self._is_paced = True
        self.uploading()

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """Measure what arrives while the block lasts."""
        self._count()
        before = self.traffic.arrived_bytes, self.traffic.arriving_s
        try:
            yield
        finally:
            arrived, seconds = self.traffic.arrived_bytes - before[0], self.traffic.arriving_s - before[1]
            self.down.add(Haul(arrived, seconds, self.clock()))

    def read(self, at: float) -> ProbeResult:
        """Return the figures of the link; absent where no transfer was long enough yet."""
        readings: dict[str, Reading] = {}
        absent: dict[str, Absent] = {}
        for way in (self.up, self.down):
            mean, low = f"link.{way.name}_bits_per_s", f"link.{way.name}_p20_bits_per_s"
            if rate := estimate(way.hauls):
                source = f"own transfers, n = {rate.n}, confidence {rate.confidence(at)}"
                for name, value in ((mean, rate.bits_per_s), (low, rate.p20_bits_per_s)):
                    readings[name] = Reading(
                        value=value,
                        unit="bits_per_s",
                        source=source,
                        quality="measured",
                        at=rate.at,
                        uncertainty=rate.spread_bits_per_s,
                    )
            else:
                cause = f"no transfer of {MIN_HAUL_BYTES >> 10} KiB and {MIN_HAUL_S} s yet"
                absent |= dict.fromkeys((mean, low), Absent(lack="not_present", cause=cause))
        return ProbeResult(readings=readings, absent=absent)

    def _count(self) -> Counts | None:
        """Count now; what was measured from another address is forgotten, for that is another link."""
        if counts := self.traffic.counts():
            if self._address and counts.address != self._address:
                self.up.reset()
                self.down.reset()
                self._sent_bytes, self._sending_s = 0, 0.0
            self._address = counts.address
        return counts
