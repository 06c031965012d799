"""Wave selection and stop rules of a rollout, as pure functions.

Canaries come first, one or more boards of each profile; until one has committed the release, no other board of that
profile is offered it. Then waves follow, each up to a share of the boards; a wave is over when all its online boards
have committed the release or failed. Offline boards neither count nor block, and resume when they are back.

Agent versions are the exception: a board is offline during its trial, so an offline board still blocks its wave. One
that stays offline for longer than a trial has failed (`step_limits`), since the version may have broken it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from edge_server.journal.rollouts.file import Order, Outcome, RolloutPlan
from edge_server.journal.rollouts.state import Mode, RolloutState, board_standing
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.packages import AGENT
from shared.tensors.counts import ceil_share

MAX_NAMED = 4
_OUTCOMES: Mapping[Mode, Outcome] = {"stopped": "stopped", "aborted": "aborted", "going-back": "taken-back"}


class Board(NamedTuple):
    """A board that serves releases.

    Attributes:
        profile: Firmware profile id; empty until the board's first report.
        status: Last status of the rollout's model; None before the first.
        until: UTC time at which an offline board fails; empty if no other board waits for it.
    """

    profile: str
    online: bool
    status: ModelStatus | None = None
    until: str = ""


class OpenWave(NamedTuple):
    """Decision to offer the release to boards, given as profile by device name."""

    devices: dict[str, str]
    canary: bool


class IssueOrder(NamedTuple):
    """Decision to stop or take back the release after too many failures."""

    order: Order
    cause: str


class EndRollout(NamedTuple):
    """Decision to end; `behind` names the offline boards that have not reached their final state."""

    outcome: Outcome
    behind: tuple[str, ...]


class AwaitBoards(NamedTuple):
    """Decision to wait, possibly forever if no board that could continue is online."""

    why: str
    no_board_online: bool = False


Boards: TypeAlias = Mapping[str, Board]
"""All boards that serve releases, by device name."""
Decision: TypeAlias = OpenWave | IssueOrder | EndRollout | AwaitBoards


def decide(state: RolloutState, boards: Boards) -> Decision:
    """Decide the next action of a rollout."""
    offered = {device: boards[device] for device in state.offered_boards if device in boards}
    behind = _boards_behind(state, boards)
    if state.mode == "going-back":
        online = (device for device in boards_to_roll_back(state, boards) if device in boards and boards[device].online)
        remaining = [device for device in online if state.stands(device, boards[device].status) != "failed"]
        return AwaitBoards(_wait_text("to go back", remaining)) if remaining else EndRollout("taken-back", behind)
    if state.mode in _OUTCOMES:
        return EndRollout(_OUTCOMES[state.mode], behind)
    if len(failures := state.failures) >= state.plan.max_failures:
        named = "; ".join(f"{device}: {reason}" for device, reason in list(failures.items())[:MAX_NAMED])
        more = f"; and {len(failures) - MAX_NAMED} more" if len(failures) > MAX_NAMED else ""
        return IssueOrder("back" if state.plan.on_failure == "back" else "stop", named + more)
    under_way = {"waiting", "taking", "trial"}
    trying = {"taking", "trial"} if state.plan.name == AGENT else set()  # offline during the trial
    active = [
        device
        for device, board in offered.items()
        if (stands := state.stands(device, board.status)) in under_way and (board.online or stands in trying)
    ]
    if active:
        return AwaitBoards(_wait_text("to commit it", active) + _trial_wait_text(offered))
    return AwaitBoards("it is paused") if state.mode == "paused" else _next_wave(state, boards, behind)


def _next_wave(state: RolloutState, boards: Boards, behind: tuple[str, ...]) -> Decision:
    plan, offered = state.plan, state.offered_boards
    fitting = {device: board for device, board in boards.items() if fnmatchcase(device, plan.devices)}
    fresh = {device: board for device, board in fitting.items() if board.online and device not in offered}
    has_it = {device for device, board in fresh.items() if board_standing(plan, board.status) == "committed"}
    candidates = {device: fresh[device].profile for device in sorted(fresh.keys() - has_it)}
    if not candidates:
        return EndRollout("finished", behind) if offered or has_it else _await_anybody(plan, boards)
    if plan.canary and (unproven := _unproven_profiles(state, boards, candidates)):
        if first := _select_canaries(state, candidates, unproven):
            return OpenWave(first, canary=True)
        candidates = {device: profile for device, profile in candidates.items() if profile not in unproven}
        if not candidates:
            return _await_first(state, unproven)
    total = len(offered) + len(fresh)
    for share in plan.waves:
        if (room := ceil_share(share, total) - len(offered) - len(has_it)) > 0:
            return OpenWave(dict(list(candidates.items())[:room]), canary=False)
    return EndRollout("finished", behind)


def boards_to_prefetch(state: RolloutState, boards: Boards) -> list[str]:
    """Return the online boards of later waves, which may fetch the release together with the current wave."""
    plan, offered = state.plan, state.offered_boards
    if not (plan.ahead and offered and state.mode == "going"):
        return []
    fresh = sorted(
        device
        for device, board in boards.items()
        if board.online and device not in offered and fnmatchcase(device, plan.devices)
    )
    lacking = [device for device in fresh if board_standing(plan, boards[device].status) == "waiting"]
    room = ceil_share(plan.waves[-1], len(offered) + len(fresh)) - len(offered) - (len(fresh) - len(lacking))
    return lacking[: max(0, room)]


def _await_anybody(plan: RolloutPlan, boards: Boards) -> AwaitBoards:
    """Wait for the first board of a rollout, with the likely reason for its absence."""
    pattern = plan.devices
    offline = [device for device in boards if fnmatchcase(device, pattern)]
    if offline:
        return AwaitBoards(_wait_text("to come back", offline), no_board_online=True)
    if boards:
        names = join_names(sorted(boards))
        return AwaitBoards(f"waiting for boards named like {pattern!r}; there are {names}", no_board_online=True)
    if plan.name == AGENT:
        why = "waiting for boards: no agent has reported its version yet"
    else:
        why = "waiting for boards that serve releases: none has connected; add [serve] to the board's agent.toml"
    return AwaitBoards(why, no_board_online=True)


def _await_first(state: RolloutState, unproven: set[str]) -> AwaitBoards:
    """Wait for canaries that went offline before they committed the release."""
    missing = _lost_canaries(state, unproven)
    profiles = join_names(sorted(unproven))
    why = f"{_wait_text('to come back', missing)}: canaries of {profiles} that have not committed it"
    return AwaitBoards(why, no_board_online=True)


def _unproven_profiles(state: RolloutState, boards: Boards, candidates: Mapping[str, str]) -> set[str]:
    """Return the candidates' profiles of which no board has committed the release."""
    proven = {board.profile for board in boards.values() if board_standing(state.plan, board.status) == "committed"}
    proven |= {profile for device, profile in state.offered_boards.items() if _has_committed(state, device)}
    return set(candidates.values()) - proven


def _has_committed(state: RolloutState, device: str) -> bool:
    return board_standing(state.plan, state.statuses.get(device)) == "committed"


def _lost_canaries(state: RolloutState, profiles: set[str]) -> list[str]:
    """Return the boards of these profiles that were offered the release and have not committed it."""
    offered = (device for device, profile in state.offered_boards.items() if profile in profiles)
    return [device for device in offered if not _has_committed(state, device)]


def _select_canaries(state: RolloutState, candidates: Mapping[str, str], unproven: set[str]) -> dict[str, str]:
    """Select canaries of unproven profiles; none of a profile that has lost more than `max_failures` canaries."""
    canaries = dict[str, str]()
    for profile in sorted(unproven):
        if len(_lost_canaries(state, {profile})) <= state.plan.max_failures:
            devices = [device for device in candidates if candidates[device] == profile]
            canaries |= dict.fromkeys(devices[: state.plan.canary], profile)
    return canaries


def boards_to_roll_back(state: RolloutState, boards: Boards) -> list[str]:
    """Return the boards that have, or are taking, the release through this rollout and must return to the previous one.

    A board that has committed its first release has no previous one and is left out.
    """
    devices = []
    for device in state.offered_boards:
        status = boards[device].status if device in boards else state.statuses.get(device)
        has_it = board_standing(state.plan, status) in ("committed", "trial", "taking")
        is_first = status is not None and status.committed == state.plan.version and not status.previous
        if has_it and not is_first and state.before.get(device) != state.plan.version:
            devices.append(device)
    return devices


def _boards_behind(state: RolloutState, boards: Boards) -> tuple[str, ...]:
    """Return the offline boards that have not reached their final state."""
    offline = {device for device, board in boards.items() if not board.online}
    if state.mode == "going-back":
        return tuple(name for name in boards_to_roll_back(state, boards) if name in offline or name not in boards)
    offline |= state.offered_boards.keys() - boards.keys()
    if state.mode == "aborted":  # boards keep a release that they have; others were never offered it
        affected, short = offline & state.offered_boards.keys(), {"waiting", "taking"}
    else:
        affected = {device for device in offline if fnmatchcase(device, state.plan.devices)}
        short = {"waiting", "taking", "trial"}
    last = {device: boards[device].status if device in boards else state.statuses.get(device) for device in affected}
    return tuple(sorted(device for device, status in last.items() if state.stands(device, status) in short))


def _wait_text(what: str, devices: list[str]) -> str:
    return f"waiting for {join_names(devices)} {what}"


def _trial_wait_text(offered: Mapping[str, Board]) -> str:
    """Name the boards that are offline during a trial, and when each is given up."""
    trials = [f"{device} until {board.until}" for device, board in offered.items() if board.until]
    return f"; offline during the trial: {join_names(trials)}" if trials else ""


def join_names(devices: Sequence[str]) -> str:
    """Join the first device names and count the others."""
    more = f" and {len(devices) - MAX_NAMED} more" if len(devices) > MAX_NAMED else ""
    return ", ".join(devices[:MAX_NAMED]) + more
