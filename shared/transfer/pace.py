"""What the pace of frames says: how long to wait for one, how many to ask for, and how large.

A slow link is no broken one: patience follows the slowest recent frame. What is under way on it stays short, so that
other messages do not wait behind it, and a frame stays far below the keep-alive, in which a client must be heard. While
nothing comes, little is asked for: so it may be asked for soon.
"""

from __future__ import annotations

from collections import deque

from shared.protocol.messages import BLOCK_BYTES

FIRST_S, FIRST_AGAIN_S = 10.0, 3.0
"""How long the first frame is waited for: of an unknown link, and at least where earlier frames tell how fast it is."""
LAST_S = 60.0
SLACK = 4.0
FADE = 0.9
RECENT = 4
"""Frames whose mean pace decides whether larger ones fit: on a lossy link they come in bursts."""
MOST_DOUBLINGS = 20  # after a day of silence one more would be no float any longer
WINDOW_S = 3.0  # a ping waits behind it, and its answer must come within the keep-alive
FRAME_S = 5.0
SMALLEST_FRAME_BYTES = 16 * 1024
SILENT_WINDOW = 2
"""Frames that are asked for while none comes."""
OUTAGE_SILENCES = 2  # one may be a broker that restarts; frames that never come whole are silent again and again


def describe_ceiling(sender: str, ceiling: int) -> str:
    """Return a line about frames that do not pass.

    Args:
        ceiling: Bytes of those that do.
    """
    return (
        f"frames larger than {ceiling >> 10} KiB do not come from {sender}, smaller ones do: going on with these; "
        "if the broker drops large messages, raise its limit (mosquitto: message_size_limit, max_packet_size)"
    )


class Pace:
    """The recent pace of one transfer. Takes its time as input.

    Args:
        floor_s: Patience on the fastest link.
        now: When the first frame was asked for.
        frame_bytes: Bytes of payload that the sender puts into a frame.

    Attributes:
        frame_bytes: Bytes of payload that a frame should have.
        ceiling: The same of the largest frames that pass, once larger ones did not come while smaller ones did, as from
            a broker that drops large messages; None until then.
    """

    def __init__(self, floor_s: float, now: float, frame_bytes: int) -> None:
        self.frame_bytes = self._usual_bytes = frame_bytes
        self.ceiling: int | None = None
        self._largest_came = self._missing = 0
        self._floor_s, self._heard_at = floor_s, now
        self._slowest_s: float | None = None
        self._frame_s = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._silences = 0
        self._came, self._is_silent = False, False
        self._first_s = FIRST_S

    def remember(self, before: Pace) -> None:
        """Start with the frame size and the slowest frame of an earlier transfer over the same link."""
        self.limit(before.ceiling)
        if before._slowest_s is not None:
            self._first_s = min(FIRST_S, max(FIRST_AGAIN_S, SLACK * before._slowest_s))

    def limit(self, ceiling: int | None) -> None:
        """Ask for no larger frames than those that passed before; None for any."""
        if ceiling is not None and (self.ceiling is None or ceiling < self.ceiling):
            self.ceiling = max(ceiling, SMALLEST_FRAME_BYTES)
            self.frame_bytes = min(self.frame_bytes, self.ceiling)

    def passed(self, size: int) -> None:
        """Note that a frame of that size came, be it too late or of another payload: such ones are not dropped."""
        self._largest_came = max(self._largest_came, size)

    def heard(self, now: float, size: int | None = None) -> None:
        """Note a frame with `size` bytes of payload, None for as many as were asked for.

        The slowest recent one counts, since frames come in bursts, and a larger one would have been as much slower.
        """
        gap = now - self._heard_at
        frame_s = gap * max(1.0, self.frame_bytes / max(size or self.frame_bytes, SMALLEST_FRAME_BYTES))
        self._slowest_s = gap if self._slowest_s is None else max(gap, FADE * self._slowest_s)
        self._frame_s = max(frame_s, FADE * self._frame_s)
        self._recent.append((gap, size or self.frame_bytes))
        self._heard_at, self._silences, self._came, self._is_silent = now, 0, True, False
        self.passed(size or self.frame_bytes)
        if self.frame_bytes < self._missing and self._largest_came < self._missing:
            self.limit(self.frame_bytes)
            self._missing = 0
        if gap > FRAME_S:
            self._halve()
        elif self._has_room():
            larger = min(2 * self.frame_bytes, self._usual_bytes, self.ceiling or self._usual_bytes)
            self._frame_s *= larger / self.frame_bytes
            self.frame_bytes = larger

    def _has_room(self) -> bool:
        """Tell whether frames twice as large would come quickly too."""
        seconds, done = sum(gap for gap, _ in self._recent), sum(size for _, size in self._recent)
        return 2 * self.frame_bytes * seconds < FRAME_S / 4 * done

    def begins(self, now: float) -> None:
        """Note that another payload begins to come: the time since the last one's end was no silence."""
        self._heard_at, self._silences, self._is_silent = now, 0, False

    def asked_anew(self, now: float) -> None:
        """Note that the sender is back from an outage, and is asked again for all that lacks.

        If no frame came whole since it was back the last time, frames may outlast its keep-alive: smaller ones then.
        """
        if not self._came:
            self._halve()
        self._heard_at, self._silences, self._came = now, 0, False

    def gave_up(self, now: float) -> None:
        """Note that what was under way is taken for lost; the next patience is twice as long."""
        self._heard_at, self._silences, self._is_silent = now, min(self._silences + 1, MOST_DOUBLINGS), True
        grew = 0 < self._largest_came < self.frame_bytes
        if grew or self._silences >= OUTAGE_SILENCES:
            self._missing = self._missing or self.frame_bytes
            self._halve()

    def doubt(self, now: float) -> None:
        """Note that the sender is there, and that nothing of what was asked for will come: little is, and anew."""
        if self._is_silent:
            self._halve()
        self._heard_at, self._silences, self._is_silent = now, 0, True

    def begin_small(self) -> None:
        """Ask for small frames first; while they come quickly, each is asked for twice as large as the last."""
        self.frame_bytes = min(SMALLEST_FRAME_BYTES, self._usual_bytes)

    def _halve(self) -> None:
        smallest = min(SMALLEST_FRAME_BYTES, self._usual_bytes)
        self.frame_bytes = max(self.frame_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES, smallest)

    def window(self, most: int) -> int:
        """Return how many frames may be under way: at most `most`, and two at least; no more after a silence."""
        if self._is_silent:
            return min(most, SILENT_WINDOW)
        if not self._frame_s:
            return most
        return max(2, min(most, int(WINDOW_S / self._frame_s)))

    def room(self, most: int) -> int:
        """Return how many frames of the next payload may come unasked: none before any has told how fast they come."""
        return self.window(most) if self._slowest_s is not None else 0

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last frame came, or was asked for."""
        return now - self._heard_at

    def left_s(self, now: float) -> float:
        """Return the seconds until what is under way counts as lost; 0 if it does."""
        usual = self._first_s if self._slowest_s is None else max(self._floor_s, SLACK * self._slowest_s)
        return max(0.0, self._heard_at + min(usual * (1 << self._silences), LAST_S) - now)
