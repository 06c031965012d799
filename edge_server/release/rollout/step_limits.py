"""Time limits of a board's rollout steps.

A board that exceeds one has failed and no longer blocks its wave. Each step is timed separately, and only while the
board is online. Agent versions are the exception: their trial restarts the agent, so a board that stays offline may
have been broken by the version, and its offline time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from edge_server.journal.rollouts.file import RolloutPlan
from edge_server.journal.rollouts.state import RolloutState, board_standing
from edge_server.release.rollout.waves import Boards
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.packages import AGENT, MOST_BUSY_S
from shared.protocol.update import UpdateTerms

FETCH_S = 120.0
"""Allowance for a download beside its transfer: a repeated offer, and parts sent to other boards first."""
GATES_S = 2 * 900.0 + 120.0
"""A board ends a candidate's gates after 900 s, and repeats them once if their process died."""
AGENT_GATES_S = MOST_BUSY_S + 300.0
"""Before the trial, a board unpacks the agent version, starts it and waits for its current task to end."""
TRIAL_S = 120.0
"""Margin beyond the trial deadline that the board enforces."""
AWAY = "check the board (`device-agent upgrade status`); `edge-server rollout resume` continues without it"


class TimeLimit(NamedTuple):
    """Time limit of a board's current step.

    Attributes:
        step: `fetch`, `gates` or `trial`.
        cause: Failure cause to record when the limit is exceeded.
    """

    step: str
    seconds: float
    cause: str


def step_limit(plan: RolloutPlan, status: ModelStatus | None, size: int) -> TimeLimit | None:
    """Return the time limit of a board's current step; None if it has no step left.

    Args:
        status: Last status of the board.
        size: Bytes that the board has to fetch.
    """
    stands = board_standing(plan, status)
    if stands == "trial":
        limit_s = UpdateTerms(soak_s=plan.soak_s).deadline_s + TRIAL_S
        return TimeLimit("trial", limit_s, f"its trial did not end within {limit_s:.0f} s")
    if stands == "taking" and status and status.state != "offered":
        limit_s = AGENT_GATES_S if plan.name == AGENT else GATES_S
        return TimeLimit("gates", limit_s, f"its gates did not end within {limit_s:.0f} s")
    if stands not in ("waiting", "taking"):
        return None
    limit_s = FETCH_S + size / plan.least_bytes_per_s
    rate = f"{plan.least_bytes_per_s / 1e3:g} kB/s"
    return TimeLimit("fetch", limit_s, f"it did not fetch {size / 1e6:.1f} MB within {limit_s:.0f} s, as {rate} would")


def offline_limit(plan: RolloutPlan, status: ModelStatus | None) -> TimeLimit | None:
    """Return the limit on a board's offline time during an agent trial; None if others do not wait for it.

    Args:
        status: Last status of the board.
    """
    if plan.name != AGENT or board_standing(plan, status) not in ("taking", "trial"):
        return None
    limit_s = UpdateTerms(soak_s=plan.soak_s).deadline_s + TRIAL_S
    return TimeLimit("trial", limit_s, f"it did not come back from its trial within {limit_s:.0f} s: {AWAY}")


def step_limits(state: RolloutState, boards: Boards, wanted_bytes: Callable[[str], int]) -> dict[str, TimeLimit]:
    """Return the time limits of the boards that block the current wave, by device name.

    Args:
        wanted_bytes: Returns the bytes that a board has to fetch.
    """
    limits, plan = {}, state.plan
    for device in state.offered_boards:
        if device not in boards or device in state.given_up:
            continue
        status, online = boards[device].status, boards[device].online
        limit = step_limit(plan, status, wanted_bytes(device)) if online else offline_limit(plan, status)
        if limit:
            limits[device] = limit
    return limits


class StepTimer:
    """Elapsed seconds of each board and step."""

    def __init__(self) -> None:
        self._elapsed_s: dict[tuple[str, str], float] = {}
        self._checked_at: float | None = None

    def overdue(self, limits: Mapping[str, TimeLimit], now: float) -> dict[str, str]:
        """Add the seconds since the last call; return the cause for each board over its limit.

        Args:
            limits: Limits of the boards to time, by device name.
            now: Current time in monotonic seconds.
        """
        passed_s = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at, late = now, dict[str, str]()
        for device, limit in limits.items():
            step = device, limit.step
            # a step is timed from the first call that sees it
            elapsed_s = self._elapsed_s[step] + passed_s if step in self._elapsed_s else 0.0
            self._elapsed_s[step] = elapsed_s
            if elapsed_s > limit.seconds:
                late[device] = limit.cause
        return late

    def remaining_s(self, device: str, limit: TimeLimit) -> float:
        """Return the seconds left to a board for a step."""
        return max(0.0, limit.seconds - self._elapsed_s.get((device, limit.step), 0.0))
