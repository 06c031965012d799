"""Duration and bytes of each update's upload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from device_agent.measurement.link_meter import LinkMeter
from shared.protocol.measurements import Cost
from shared.protocol.messages import Update
from shared.runtime.clock import Clock, monotonic


@dataclass(frozen=True)
class CompletedUpload:
    """Duration, bytes and previous cost of one acknowledged update.

    Attributes:
        started: When the server first requested frames; equal to `ended` if it requested none.
        ended: When the server acknowledged the update.
        bytes_up: Bytes of all frames, repeated ones included.
        cost: Cost of the task before the upload.
    """

    run: str
    round: int
    started: float
    ended: float
    bytes_up: int
    cost: Cost = field(default_factory=Cost)


@dataclass
class UploadMeter:
    """Measures the uploads of updates until the server acknowledges them.

    Attributes:
        link: Notified when frames are requested and when an update is acknowledged.
        on_start: Called for every request for frames.
        on_settled: Called for every acknowledged update.
        bytes_sent: Bytes of frames, headers included.
    """

    clock: Clock = monotonic
    link: LinkMeter = field(default_factory=LinkMeter)
    on_start: Callable[[], None] = lambda: None
    on_settled: Callable[[CompletedUpload], None] = lambda _: None
    bytes_sent: int = 0
    _uploads: dict[tuple[str, int, bytes], tuple[float, int]] = field(default_factory=dict)

    def begin(self) -> float:
        """Note that frames are about to be sent; return the time."""
        self.link.note_progress()
        self.on_start()
        return self.clock()

    def add(self, update: Update, started: float, size: int) -> None:
        """Count bytes of frames of an update; its upload began at `started` unless it had begun before."""
        began, carried = self._uploads.get(_attempt(update), (started, 0))
        self._uploads[_attempt(update)] = began, carried + size

    def has_begun(self, update: Update) -> bool:
        """Return True if frames of this update were sent; a repeated round has another update."""
        return _attempt(update) in self._uploads

    def finish(self, update: Update, *, is_void: bool) -> None:
        """End the upload of an acknowledged update; one that is void is not reported."""
        self.link.finish_upload()
        ended = self.clock()
        started, carried = self._uploads.pop(_attempt(update), (ended, 0))
        if not is_void:
            self.on_settled(CompletedUpload(update.run, update.round, started, ended, carried, update.cost))


def _attempt(update: Update) -> tuple[str, int, bytes]:
    return update.run, update.round, update.start
