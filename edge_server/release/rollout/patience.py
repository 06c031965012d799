"""How long a board may take over each step of a release, by its size: else it held its wave for ever.

Seconds in which a board is away do not count, nor does what another step of its took. A version of the agent is another
matter: its trial takes the board away, so that one which stays away may be one that this version took away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from edge_server.journal.rollouts.file import RolloutPlan
from edge_server.journal.rollouts.state import RolloutState, board_standing
from edge_server.release.rollout.waves import Board
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.packages import AGENT, MOST_BUSY_S
from shared.protocol.update import UpdateTerms

FETCH_S = 120.0
"""For a download beside what its bytes take: the offer may come twice, and others may be sent something first."""
GATES_S = 2 * 900.0 + 120.0
"""A board ends a candidate's gates itself after 900 s, and tries one twice under which their process died."""
AGENT_GATES_S = MOST_BUSY_S + 300.0
"""A board unpacks a version of the agent and has it start, and waits for its task to end, before it tries it."""
TRIAL_S = 120.0
"""Beyond the deadline that a board gives a trial itself."""
AWAY = "look at the board (`device-agent upgrade status`); `edge-server rollout resume` goes on without it"


class TimeLimit(NamedTuple):
    """Of what a board is at.

    Attributes:
        step: `fetch`, `gates` or `trial`.
        cause: Of the failure where it takes more.
    """

    step: str
    seconds: float
    cause: str


def time_limit(plan: RolloutPlan, status: ModelStatus | None, size: int) -> TimeLimit | None:
    """Return what bounds the step that a board is at; None where it is done.

    Args:
        status: What the board said last.
        size: Bytes that it is to fetch.
    """
    stands = board_standing(plan, status)
    if stands == "trial":
        limit_s = UpdateTerms(soak_s=plan.soak_s).deadline_s + TRIAL_S
        return TimeLimit("trial", limit_s, f"its trial did not end within {limit_s:.0f} s")
    if stands == "taking" and status and status.state != "offered":
        limit_s = AGENT_GATES_S if plan.name == AGENT else GATES_S
        return TimeLimit("gates", limit_s, f"it did not try it out within {limit_s:.0f} s")
    if stands not in ("waiting", "taking"):
        return None
    limit_s = FETCH_S + size / plan.least_bytes_per_s
    rate = f"{plan.least_bytes_per_s / 1e3:g} kB/s"
    return TimeLimit("fetch", limit_s, f"it did not fetch {size / 1e6:.1f} MB within {limit_s:.0f} s, as {rate} would")


def away_limit(plan: RolloutPlan, status: ModelStatus | None) -> TimeLimit | None:
    """Return what bounds how long a board may stay away; None where the others do not wait for it.

    Args:
        status: What the board said last.
    """
    if plan.name != AGENT or board_standing(plan, status) not in ("taking", "trial"):
        return None
    limit_s = UpdateTerms(soak_s=plan.soak_s).deadline_s + TRIAL_S
    return TimeLimit("trial", limit_s, f"it did not come back from its trial within {limit_s:.0f} s: {AWAY}")


def time_limits(
    state: RolloutState, boards: Mapping[str, Board], wanted_bytes: Callable[[str], int]
) -> dict[str, TimeLimit]:
    """Return what bounds the boards that others wait for.

    Args:
        boards: All that serve releases, by name.
        wanted_bytes: Returns what a board is to fetch.
    """
    step_limits = {}
    for device in (name for name in state.offered_boards if name in boards and name not in state.given_up):
        status, plan = boards[device].status, state.plan
        is_there = boards[device].online
        limit = time_limit(plan, status, wanted_bytes(device)) if is_there else away_limit(plan, status)
        if limit:
            step_limits[device] = limit
    return step_limits


class Patience:
    """Counts the seconds that boards take over each step."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], float] = {}
        self._looked_at: float | None = None

    def overdue(self, limits: Mapping[str, TimeLimit], now: float) -> dict[str, str]:
        """Return the boards that took too long, and over what.

        Args:
            limits: Of the boards that are at something.
            now: Monotonic seconds; those since the last call are counted.
        """
        passed_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at, late = now, dict[str, str]()
        for device, limit in limits.items():
            step = device, limit.step
            # what came before somebody first looked at a step is not of it
            taken_s = self._taken[step] + passed_s if step in self._taken else 0.0
            self._taken[step] = taken_s
            if taken_s > limit.seconds:
                late[device] = limit.cause
        return late

    def remaining_s(self, device: str, limit: TimeLimit) -> float:
        """Return the seconds that a board still has for a step."""
        return max(0.0, limit.seconds - self._taken.get((device, limit.step), 0.0))
