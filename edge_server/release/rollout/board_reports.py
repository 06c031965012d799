"""Last reports of a rollout's boards: presence, profile, status of the release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.fleet.record_limiter import RecordLimiter
from edge_server.fleet.state import Fleet
from edge_server.journal.rollouts.file import BoardReported
from edge_server.release.rollout.due_messages import boards_fetching, boards_prefetching
from edge_server.release.rollout.record_log import RecordLog
from edge_server.release.rollout.waves import Board
from shared.errors import WireError
from shared.protocol.inference.rollout import ModelStatus, Releases
from shared.protocol.messages import Report, Status
from shared.runtime.clock import Clock, utc_stamp

STATUS_BURST, STATUS_RECORDS_PER_S = 128.0, 1 / 30
"""Rate limit of status records by board; a rollout needs about eight for each. Beyond the limit, only the latest status
is recorded, as soon as the limit permits."""
MAX_BOARDS = 1 << 14
PROFILE_WAIT_S = 10.0
"""Wait for the first report of a new board: canaries are selected by the profile in it."""


def _make_limiter() -> RecordLimiter:
    return RecordLimiter(STATUS_BURST, STATUS_RECORDS_PER_S, "a rollout's journal")


@dataclass
class BoardReports:
    """Reports of boards; changed statuses are recorded.

    Attributes:
        clock: Clock in monotonic seconds.
        models: Last status of each board for this release's model; its name is empty without one.
        prepared: Deployment whose parts each board has prefetched completely.
        given_up_at: UTC time at which an offline board will be given up.
    """

    log: RecordLog
    clock: Clock
    fleet: Fleet = field(default_factory=Fleet)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    prepared: dict[str, str] = field(default_factory=dict)
    given_up_at: dict[str, str] = field(default_factory=dict)
    _profiles: dict[str, str] = field(default_factory=dict)
    _first_seen_at: dict[str, float] = field(default_factory=dict)
    _limiter: RecordLimiter = field(default_factory=_make_limiter)
    _unrecorded: set[str] = field(default_factory=set)

    def boards(self) -> dict[str, Board]:
        """Return the boards that serve releases, by device name."""
        online = set(self.fleet.online)
        return {
            device: Board(
                self._profiles.get(device, ""),
                device in online,
                status if status.name else None,
                self.given_up_at.get(device, ""),
            )
            for device, status in sorted(self.models.items())
        }

    def find_fetching(self) -> set[str]:
        """Return the online boards that may still request parts."""
        state, boards = self.log.state, self.boards()
        return boards_fetching(state, boards) | set(boards_prefetching(state, boards, self.prepared))

    def find_newcomers(self, profiles: Mapping[str, str]) -> list[str]:
        """Return the boards that have just connected and whose profile is unknown, of profiles by device name."""
        now, unknown = self.clock(), (device for device, profile in profiles.items() if not profile)
        return [device for device in unknown if now - self._first_seen_at[device] < PROFILE_WAIT_S]

    def observe_status(self, message: Status) -> bool:
        """Handle a board's presence; return True if it has connected since its last one."""
        before = self.fleet.statuses.get(message.device)
        self.fleet.observe(message)
        return message.online and (before is None or before.session != message.session)

    def observe_report(self, message: Report) -> None:
        """Handle a board's measurements, which name its profile."""
        self._profiles[message.device] = message.board
        self.fleet.observe(message)

    def observe_releases(self, message: Releases) -> None:
        """Handle a board's statuses, and record a change.

        Raises:
            WireError: There are too many boards.
        """
        device, plan = message.device, self.log.state.plan
        if device not in self.models and len(self.models) >= MAX_BOARDS:
            raise WireError(f"{device}: more than {MAX_BOARDS} boards", reason="too-many-devices")
        status = next((model for model in message.models if model.name == plan.name), ModelStatus(name=""))
        before = self.models.get(device)
        self._first_seen_at.setdefault(device, self.clock())
        self.models[device], self.prepared[device] = status, message.ahead
        if before is None or _recorded_fields(before) != _recorded_fields(status):
            self._record(device)

    def record_postponed(self) -> None:
        """Record the statuses that were above the rate limit, if it permits now."""
        for device in tuple(self._unrecorded):
            self._record(device)

    def _record(self, device: str) -> None:
        """Record a board's status if it changed; postpone the record above the rate limit."""
        self._unrecorded.discard(device)
        state, status = self.log.state, self.models[device]
        recorded = state.statuses.get(device)
        if not status.name or device not in state.offered_boards:
            return
        if recorded and _recorded_fields(recorded) == _recorded_fields(status):
            return
        if self._limiter.take(device, self.clock()):
            self.log.add(BoardReported(at=utc_stamp(), device=device, status=status))
        else:
            self._unrecorded.add(device)


def _recorded_fields(status: ModelStatus) -> tuple[object, ...]:
    """Return the fields of a status whose changes are recorded."""
    return (
        *(status.name, status.committed, status.previous, status.candidate),
        *(status.state, status.deployment, status.attempt, status.reason),
    )
