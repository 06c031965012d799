"""Connection and settings that the parts of a running rollout share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_server.journal.rollouts.file import AnyRolloutRecord
from edge_server.journal.rollouts.state import RolloutState
from edge_server.release.rollout.agents import StoredAgent
from edge_server.release.store import StoredRelease
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker
from shared.transport.base import Transport


@dataclass(frozen=True)
class RolloutLink:
    """Connection from a rollout to its boards.

    Attributes:
        clock: Clock in monotonic seconds.
        worker: Runs blocking file access.
        stored: What is rolled out.
        frame_bytes: Payload bytes in one frame.
        patience_s: Seconds that one board may delay the others that receive the same bundle.
        closed_topics: Topics closed to flooding boards, shared with the transport.
    """

    site: str
    transport: Transport
    clock: Clock
    worker: Worker
    stored: StoredRelease | StoredAgent
    frame_bytes: int
    patience_s: float
    closed_topics: set[bytes] = field(default_factory=set)

    @property
    def status_channel(self) -> str:
        """Channel of the boards' statuses."""
        return "agent" if isinstance(self.stored, StoredAgent) else "release"

    @property
    def offer_channel(self) -> str:
        """Channel of messages to a board."""
        return "upgrade" if isinstance(self.stored, StoredAgent) else "offer"


@dataclass(frozen=True)
class RolloutOptions:
    """End and output of a rollout's process.

    Attributes:
        stays: Whether to keep running for offline boards when nothing is left to do for those online.
        wait_s: Seconds to wait while all boards that could take the release are offline, before the rollout stops.
        on_record: Called with the new state for each appended record.
        on_wait: Called with the reason for waiting whenever it changes.
    """

    stays: bool = False
    wait_s: float = math.inf
    on_record: Callable[[RolloutState, AnyRolloutRecord], None] = lambda _state, _record: None
    on_wait: Callable[[str], None] = lambda _why: None
