"""How long to wait for a frame before it counts as lost: a slow link is no broken one."""

from __future__ import annotations

FIRST_S = 10.0
LAST_S = 60.0
SLACK = 4.0
FADE = 0.9
MOST_DOUBLINGS = 20  # after a day of silence one more would be no float any longer


class Pace:
    """The recent pace of one transfer. Takes its time as input.

    Args:
        floor_s: Patience on the fastest link.
        now: When the first frame was asked for.
    """

    def __init__(self, floor_s: float, now: float) -> None:
        self._floor_s, self._heard_at = floor_s, now
        self._slowest_s: float | None = None
        self._silences = 0

    def heard(self, now: float) -> None:
        """Note a frame. The slowest recent one counts, since frames come in bursts."""
        gap = now - self._heard_at
        self._slowest_s = gap if self._slowest_s is None else max(gap, FADE * self._slowest_s)
        self._heard_at, self._silences = now, 0

    def gave_up(self, now: float) -> None:
        """Note that what was under way is taken for lost; the next patience is twice as long."""
        self._heard_at, self._silences = now, min(self._silences + 1, MOST_DOUBLINGS)

    def left_s(self, now: float) -> float:
        """Return the seconds until what is under way counts as lost; 0 if it does."""
        usual = FIRST_S if self._slowest_s is None else max(self._floor_s, SLACK * self._slowest_s)
        return max(0.0, self._heard_at + min(usual * (1 << self._silences), LAST_S) - now)
