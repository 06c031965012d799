"""Frame pace of a link: adaptive timeouts, window and frame size.

A slow link is not a broken one: the timeout follows the slowest recent frame. Little is in flight on a slow link, so
that other messages do not wait behind frames, and a frame stays far below the keep-alive interval. While nothing
arrives, little is requested, so that requests can be repeated soon.
"""

from __future__ import annotations

from collections import deque

from shared.protocol.messages import BLOCK_BYTES

FIRST_S, FIRST_AGAIN_S = 10.0, 3.0
"""Timeouts of the first frame: on an unknown link, and the minimum where earlier frames show its speed."""
LAST_S = 60.0
SLACK = 4.0
FADE = 0.9
RECENT = 4
"""Frames whose mean pace decides whether larger ones fit: on a lossy link they come in bursts."""
MOST_DOUBLINGS = 20  # a day of silence must not overflow the float
WINDOW_S = 3.0  # a ping waits behind the window, and must be answered within the keep-alive
FRAME_S = 5.0
SMALLEST_FRAME_BYTES = 16 * 1024
SILENT_WINDOW = 2
"""Window while no frame arrives."""
OUTAGE_SILENCES = 2  # one may be a broker's restart; frames that are too large time out again and again


def describe_ceiling(sender: str, ceiling: int) -> str:
    """Describe a limit on the frame size, for the log.

    Args:
        ceiling: Size of the largest frames that arrive, in bytes.
    """
    return (
        f"frames larger than {ceiling >> 10} KiB from {sender} do not arrive, smaller ones do: continuing with these; "
        "if the broker drops large messages, raise its limit (mosquitto: message_size_limit, max_packet_size)"
    )


class Pace:
    """Recent pace of one transfer; the caller passes the time.

    Args:
        floor_s: Shortest timeout, on the fastest link.
        now: Time of the first request.
        frame_bytes: The sender's payload bytes per frame.

    Attributes:
        frame_bytes: Payload bytes per frame to request.
        ceiling: Size of the largest frames that arrive, if larger ones were lost while smaller ones came, as with a
            broker that drops large messages; None if no such limit was seen.
    """

    def __init__(self, floor_s: float, now: float, frame_bytes: int) -> None:
        self.frame_bytes = self._usual_bytes = frame_bytes
        self.ceiling: int | None = None
        self._largest_seen = self._missing = 0
        self._floor_s, self._last_at = floor_s, now
        self._slowest_s: float | None = None
        self._frame_s = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._silences = 0
        self._has_frames, self._is_silent = False, False
        self._first_s = FIRST_S

    def remember(self, before: Pace) -> None:
        """Start with the frame size limit and the slowest frame of an earlier transfer over the same link."""
        self.limit(before.ceiling)
        if before._slowest_s is not None:
            self._first_s = min(FIRST_S, max(FIRST_AGAIN_S, SLACK * before._slowest_s))

    def limit(self, ceiling: int | None) -> None:
        """Request no larger frames than `ceiling`; None for no limit."""
        if ceiling is not None and (self.ceiling is None or ceiling < self.ceiling):
            self.ceiling = max(ceiling, SMALLEST_FRAME_BYTES)
            self.frame_bytes = min(self.frame_bytes, self.ceiling)

    def note_size(self, size: int) -> None:
        """Note the size of any arrived frame, even if late or of another payload: the broker does not drop such."""
        self._largest_seen = max(self._largest_seen, size)

    def note_frame(self, now: float, size: int | None = None) -> None:
        """Note a frame with `size` payload bytes; None for the requested size.

        The slowest recent frame counts, since frames come in bursts, and a larger one would have been proportionally
        slower.
        """
        gap = now - self._last_at
        frame_s = gap * max(1.0, self.frame_bytes / max(size or self.frame_bytes, SMALLEST_FRAME_BYTES))
        self._slowest_s = gap if self._slowest_s is None else max(gap, FADE * self._slowest_s)
        self._frame_s = max(frame_s, FADE * self._frame_s)
        self._recent.append((gap, size or self.frame_bytes))
        self._last_at, self._silences, self._has_frames, self._is_silent = now, 0, True, False
        self.note_size(size or self.frame_bytes)
        if self.frame_bytes < self._missing and self._largest_seen < self._missing:
            self.limit(self.frame_bytes)
            self._missing = 0
        if gap > FRAME_S:
            self._halve()
        elif self._has_room():
            larger = min(2 * self.frame_bytes, self._usual_bytes, self.ceiling or self._usual_bytes)
            self._frame_s *= larger / self.frame_bytes
            self.frame_bytes = larger

    def _has_room(self) -> bool:
        """Check whether frames of twice the size would arrive quickly too."""
        seconds, done = sum(gap for gap, _ in self._recent), sum(size for _, size in self._recent)
        return 2 * self.frame_bytes * seconds < FRAME_S / 4 * done

    def begins(self, now: float) -> None:
        """Note that another payload begins: the time since the end of the last one was not silence."""
        self._last_at, self._silences, self._is_silent = now, 0, False

    def note_outage(self, now: float) -> None:
        """Note that the sender is back from an outage, and everything missing is requested again.

        If no frame arrived since its previous outage, frames may outlast its keep-alive interval: request smaller ones.
        """
        if not self._has_frames:
            self._halve()
        self._last_at, self._silences, self._has_frames = now, 0, False

    def time_out(self, now: float) -> None:
        """Note that requested frames count as lost; the next timeout is twice as long."""
        self._last_at, self._silences, self._is_silent = now, min(self._silences + 1, MOST_DOUBLINGS), True
        grew = 0 < self._largest_seen < self.frame_bytes
        if grew or self._silences >= OUTAGE_SILENCES:
            self._missing = self._missing or self.frame_bytes
            self._halve()

    def doubt(self, now: float) -> None:
        """Note that the sender is online but will not send what was requested: request little, and again."""
        if self._is_silent:
            self._halve()
        self._last_at, self._silences, self._is_silent = now, 0, True

    def begin_small(self) -> None:
        """Start with small frames; while they arrive quickly, the size doubles."""
        self.frame_bytes = min(SMALLEST_FRAME_BYTES, self._usual_bytes)

    def _halve(self) -> None:
        smallest = min(SMALLEST_FRAME_BYTES, self._usual_bytes)
        self.frame_bytes = max(self.frame_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES, smallest)

    def window(self, most: int) -> int:
        """Return the most frames that may be in flight, from two to `most`; few after a timeout."""
        if self._is_silent:
            return min(most, SILENT_WINDOW)
        if not self._frame_s:
            return most
        return max(2, min(most, int(WINDOW_S / self._frame_s)))

    def room(self, most: int) -> int:
        """Return the number of frames that may be pushed of the next payload: none while the pace is unknown."""
        return self.window(most) if self._slowest_s is not None else 0

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last frame or the last request."""
        return now - self._last_at

    def remaining_s(self, now: float) -> float:
        """Return the seconds until requested frames count as lost; 0 if they do."""
        usual = self._first_s if self._slowest_s is None else max(self._floor_s, SLACK * self._slowest_s)
        return max(0.0, self._last_at + min(usual * (1 << self._silences), LAST_S) - now)
