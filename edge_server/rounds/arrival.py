"""One update on its way: what was offered, where its bytes go, how fast they come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_server.config import LinkConfig
from shared.protocol.messages import Transfer, Update, Want
from shared.transfer.pace import Pace
from shared.transfer.to_file import Spool


@dataclass
class Arrival:
    """An update between its offer and its last frame.

    Attributes:
        update: The offer.
        spool: Where its payload goes.
        pace: How fast that comes.
        away: Whether its device is known to be gone.
    """

    update: Update
    spool: Spool
    pace: Pace
    away: bool = False

    def want(self, window: int) -> Want | None:
        """Return what to ask for now, with at most `window` frames under way; None for nothing yet."""
        assembly = self.spool.assembly
        ranges = assembly.ask(self.pace.window(window), self.pace.frame_bytes)
        return (
            Want(digest=assembly.transfer.digest, frame_bytes=self.pace.frame_bytes, ranges=ranges) if ranges else None
        )

    def returned(self, now: float) -> None:
        """Note that the device has connected anew: what was under way is lost."""
        self.away = False
        self.pace.asked_anew(now)
        self.spool.assembly.forget()

    def gave_up(self, now: float) -> bool:
        """Tell whether the device has been silent for too long; what was under way is lost then."""
        if self.pace.left_s(now):
            return False
        self.pace.gave_up(now)
        self.spool.assembly.forget()
        return True


def begin(update: Update, transfer: Transfer, path: Path, link: LinkConfig, now: float) -> Arrival:
    """Make a place for an update, or go on in the one that an earlier process made.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    frame_bytes = min(transfer.frame_bytes, link.frame_bytes)  # what is under way is counted in frames of ours
    pace = Pace(link.patience_s, now, frame_bytes)
    pace.begin_small()  # a broker hangs up on a device whose frame outlasts the keep-alive; its link is not known yet
    return Arrival(update, Spool(path, transfer), pace)
