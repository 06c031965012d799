"""Measure link rates from the agent's ordinary transfers.

Counts goodput: TCP payload bytes received by the other end, over the seconds in which the link was busy with them. The
bit rate that a radio reports is not used: it is that of the last frame, and an idle radio reports its lowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from device_agent.measurement.link_rate import (
    MIN_TRANSFER_BYTES,
    MIN_TRANSFER_S,
    Direction,
    LinkTransfer,
    estimate_rate,
)
from device_agent.probes.base import ProbeResult
from shared.protocol.measurements import Absent, Reading
from shared.runtime.clock import Clock, monotonic
from shared.transport.tcp_info import Counts, Traffic


def measure_upload(before: Counts, after: Counts) -> tuple[int, float]:
    """Return bytes and busy seconds of an upload between two counts of one connection, without its round trip.

    The kernel's busy time ends with the acknowledgement of the last byte, a round trip later if the link was idle at
    first. If the kernel does not count it, wall time is used, up to the last byte's departure.
    """
    if before.busy_s is not None and after.busy_s is not None:
        seconds = after.busy_s - before.busy_s
    else:
        seconds = after.at - before.at - after.quiet_s
    return after.acked_bytes - before.acked_bytes, max(0.0, seconds - after.min_rtt_s * before.is_idle)


@dataclass
class LinkMeter:
    """Meter of both directions; transfers announce their start and end. Without kernel counters there are no figures.

    Attributes:
        clock: Monotonic seconds, the same as that of `traffic`.
    """

    traffic: Traffic = field(default_factory=Traffic)
    clock: Clock = monotonic
    up: Direction = field(default_factory=lambda: Direction("up"))
    down: Direction = field(default_factory=lambda: Direction("down"))
    _last: Counts | None = None
    _sent_bytes: int = 0
    _sending_s: float = 0.0
    _address: str = ""
    _is_paced: bool = False

    def __post_init__(self) -> None:
        """Start timing arrivals."""
        self.traffic.watched = True

    def note_progress(self) -> None:
        """Count what was sent on this connection since the server's last request for frames."""
        last, self._last = self._last, self._count()
        if last and self._last and last.connection == self._last.connection:
            sent_bytes, seconds = measure_upload(last, self._last)
            self._sent_bytes += sent_bytes
            self._sending_s += seconds

    def finish_upload(self) -> None:
        """Finish an upload: the server has all that it requested."""
        if self._last:
            is_measurable = not self._is_paced or self._last.busy_s is not None  # pauses are not the link's time
            self.note_progress()
            if is_measurable:
                self.up.add(LinkTransfer(self._sent_bytes, self._sending_s, self.clock()))
        self._last, self._sent_bytes, self._sending_s, self._is_paced = None, 0, 0.0, False

    def note_pause(self) -> None:
        """Note that the next frames were delayed by the agent, so that the link may have become idle.

        Then only the kernel's busy time gives a rate.
        """
        self._is_paced = True
        self.note_progress()

    @contextmanager
    def measure_download(self) -> Iterator[None]:
        """Measure arrivals during the block."""
        self._count()
        before = self.traffic.arrived_bytes, self.traffic.arriving_s
        try:
            yield
        finally:
            arrived, seconds = self.traffic.arrived_bytes - before[0], self.traffic.arriving_s - before[1]
            self.down.add(LinkTransfer(arrived, seconds, self.clock()))

    def read(self, at: float) -> ProbeResult:
        """Return the link's rates; absent until a transfer was long enough."""
        readings: dict[str, Reading] = {}
        absent: dict[str, Absent] = {}
        for way in (self.up, self.down):
            mean, low = f"link.{way.name}_bits_per_s", f"link.{way.name}_p20_bits_per_s"
            if rate := estimate_rate(way.transfers):
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
                cause = f"no transfer of {MIN_TRANSFER_BYTES >> 10} KiB and {MIN_TRANSFER_S} s yet"
                absent |= dict.fromkeys((mean, low), Absent(lack="not_present", cause=cause))
        return ProbeResult(readings=readings, absent=absent)

    def _count(self) -> Counts | None:
        """Return the current counts; a new address means another link and resets the figures."""
        if counts := self.traffic.counts():
            if self._address and counts.address != self._address:
                self.up.reset()
                self.down.reset()
                self._sent_bytes, self._sending_s = 0, 0.0
            self._address = counts.address
        return counts
