"""Exclusion of silent devices: online, but without any message for several rounds.

Each silent device costs a round its whole deadline. After some such rounds it is left out until it sends a message: a
report, a request for frames, an update, a birth. Now and then it is given a task all the same, and no round waits for
it. A device that sends messages is never silent, however late its updates are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from edge_server.fleet.state import Fleet

log = logging.getLogger(__name__)

SILENT_ROUNDS, SILENT_S = 3, 60.0
"""Consecutive missed deadlines without a message, and their least duration: by default agents report twice as often."""

FIRST_PROBE, LAST_PROBE = 16, 256
"""Rounds after which an excluded device is given a task again; doubled after each unanswered one."""


@dataclass
class Silence:
    """Silence of one device.

    Attributes:
        life_signs: The device's message count when the silence began.
        instance: Its agent process at that time.
        since: Start of the first of these rounds, in seconds.
        rounds: Number of missed deadlines.
        is_out: Whether the device is left out.
        skipped: Rounds since its last task.
        probe: Rounds after which it is given the next one.
    """

    life_signs: int
    instance: str
    since: float = 0.0
    rounds: int = 0
    is_out: bool = False
    skipped: int = 0
    probe: int = FIRST_PROBE


@dataclass
class SilentDevices:
    """Tracks devices that let deadlines pass without a message.

    Attributes:
        least: No device is left out of a round with fewer other devices than this.
    """

    least: int = 1
    _silences: dict[str, Silence] = field(default_factory=dict)
    _begun: dict[str, tuple[int, str]] = field(default_factory=dict)
    _begun_at: float = 0.0

    def restore(self, device: str, instance: str) -> None:
        """Leave out a device that an earlier server process left out, until it sends a message."""
        self._silences[device] = Silence(0, instance, is_out=True)

    def forget(self, device: str) -> None:
        """End a device's silence."""
        self._silences.pop(device, None)

    def is_out(self, fleet: Fleet, device: str) -> bool:
        """Return true if a device is left out and has sent nothing since."""
        silence = self._silences.get(device)
        if silence is None or not silence.is_out:
            return False
        return (silence.life_signs, silence.instance) == _life_signs(fleet, device)

    def skip_silent(self, fleet: Fleet, devices: Collection[str]) -> list[str]:
        """Return a round's devices without the silent ones, except those due for another task."""
        silent = {device for device in self._silences if self.is_out(fleet, device)}
        if not silent or sum(device not in silent for device in devices) < self.least:
            return list(devices)
        due = {device for device, silence in self._silences.items() if silence.skipped >= silence.probe}
        return [device for device in devices if device in due or device not in silent]

    def find_silent(self, fleet: Fleet, devices: Collection[str]) -> set[str]:
        """Return the silent devices of a round, which it does not wait for."""
        silent = {device for device in self._silences if device in devices and self.is_out(fleet, device)}
        return silent if len(devices) - len(silent) >= self.least else set()

    def begin(self, fleet: Fleet, devices: Collection[str], now: float) -> None:
        """Record each device's message count at the start of a round."""
        for device, silence in list(self._silences.items()):
            if (silence.life_signs, silence.instance) != _life_signs(fleet, device):
                if silence.is_out:
                    log.info("device %s sends messages again and takes part", device)
                del self._silences[device]
            elif silence.is_out and device in devices:
                silence.skipped, silence.probe = 0, min(2 * silence.probe, LAST_PROBE)
            elif silence.is_out:
                silence.skipped += 1
        self._begun, self._begun_at = {device: _life_signs(fleet, device) for device in devices}, now

    def count_miss(self, fleet: Fleet, late: Iterable[str], now: float) -> dict[str, str]:
        """Count a missed deadline; return the devices left out from now on, with the cause."""
        left_out = {}
        for device in late:
            life_signs, instance = state = _life_signs(fleet, device)
            if state != self._begun.get(device) or device not in fleet.online:
                self.forget(device)
                continue
            silence = self._silences.setdefault(device, Silence(life_signs, instance, self._begun_at))
            silence.rounds += 1
            silent_s = now - silence.since
            if not silence.is_out and silence.rounds >= SILENT_ROUNDS and silent_s >= SILENT_S:
                silence.is_out = True
                left_out[device] = f"connected, but sent no message in {silence.rounds} rounds of {silent_s:.0f} s"
        return left_out


def _life_signs(fleet: Fleet, device: str) -> tuple[int, str]:
    status = fleet.statuses.get(device)
    return fleet.life_signs[device], status.instance if status else ""
