"""Which boards are offered a release next, and when to stop: a rollout without a clock, a network or a disk.

What to do next follows from what a rollout's records come to, and from which boards are there now.
First come canaries, a board or more of each profile; a profile of which none has committed the release gets no other
board. Then waves, up to a share of the boards each; one is over when all its boards that are there have committed the
release or failed to. Boards that are away neither count nor block; one that is back goes on where it was. A version of
the agent is another matter: whoever takes it goes away for its trial, so that nobody else is offered it meanwhile; a
board that stays away for longer than trials last has failed (`patience`), since that version may have taken it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from edge_server.journal.rollouts.file import Order, Outcome, RolloutPlan
from edge_server.journal.rollouts.state import Mode, RolloutState, board_standing
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.packages import AGENT
from shared.tensors.counts import ceil_share

MOST_NAMED = 4
_OUTCOMES: Mapping[Mode, Outcome] = {"stopped": "stopped", "aborted": "aborted", "going-back": "taken-back"}


class Board(NamedTuple):
    """A board that serves releases.

    Attributes:
        profile: Id of its firmware profile.
        online: Whether it is there.
        status: What it said last of the model; None for nothing.
        until: Time of day at which it has failed if it stays away; empty where nobody waits for it.
    """

    profile: str
    online: bool
    status: ModelStatus | None = None
    until: str = ""


class OpenWave(NamedTuple):
    """Offer it to these boards: name and profile of each."""

    devices: dict[str, str]
    canary: bool


class ChangeCourse(NamedTuple):
    """Too many boards failed."""

    order: Order
    cause: str


class EndRollout(NamedTuple):
    """Nothing is left to do for those that are there."""

    outcome: Outcome
    behind: tuple[str, ...]


class AwaitBoards(NamedTuple):
    """Nothing can be done now, and why; for ever where the boards that could take it are not there."""

    why: str
    is_deserted: bool = False


Decision: TypeAlias = OpenWave | ChangeCourse | EndRollout | AwaitBoards


def decide(state: RolloutState, boards: Mapping[str, Board]) -> Decision:
    """Return what to do next.

    Args:
        boards: All that serve releases, by name.
    """
    offered = {device: boards[device] for device in state.offered_boards if device in boards}
    behind = _behind(state, boards)
    if state.mode == "going-back":
        online = (device for device in to_take_back(state, boards) if device in boards and boards[device].online)
        remaining = [device for device in online if state.stands(device, boards[device].status) != "failed"]
        return AwaitBoards(_waiting("to go back", remaining)) if remaining else EndRollout("taken-back", behind)
    if state.mode in _OUTCOMES:
        return EndRollout(_OUTCOMES[state.mode], behind)
    if len(failures := state.failures) >= state.plan.max_failures:
        named = "; ".join(f"{device}: {reason}" for device, reason in list(failures.items())[:MOST_NAMED])
        more = f"; and {len(failures) - MOST_NAMED} more" if len(failures) > MOST_NAMED else ""
        return ChangeCourse("back" if state.plan.on_failure == "back" else "stop", named + more)
    under_way = {"waiting", "taking", "trial"}
    trying = {"taking", "trial"} if state.plan.name == AGENT else set()  # it restarts into its trial: away is under way
    active = [
        device
        for device, board in offered.items()
        if (stands := state.stands(device, board.status)) in under_way and (board.online or stands in trying)
    ]
    if active:
        return AwaitBoards(_waiting("to commit it", active) + _away(offered))
    return AwaitBoards("it is paused") if state.mode == "paused" else _next_wave(state, boards, behind)


def _next_wave(state: RolloutState, boards: Mapping[str, Board], behind: tuple[str, ...]) -> Decision:
    plan, offered = state.plan, state.offered_boards
    fitting = {device: board for device, board in boards.items() if fnmatchcase(device, plan.devices)}
    fresh = {device: board for device, board in fitting.items() if board.online and device not in offered}
    has_it = {device for device, board in fresh.items() if board_standing(plan, board.status) == "committed"}
    candidates = {device: fresh[device].profile for device in sorted(fresh.keys() - has_it)}
    if not candidates:
        return EndRollout("finished", behind) if offered or has_it else _await_anybody(plan, boards)
    if plan.canary and (unproven := _unproven(state, boards, candidates)):
        if first := _canaries(state, boards, unproven):
            return OpenWave(first, canary=True)
        candidates = {device: profile for device, profile in candidates.items() if profile not in unproven}
        if not candidates:
            return _await_first(state, unproven)
    total = len(offered) + len(fresh)
    for share in plan.waves:
        if (room := ceil_share(share, total) - len(offered) - len(has_it)) > 0:
            return OpenWave(dict(list(candidates.items())[:room]), canary=False)
    return EndRollout("finished", behind)


def to_prepare(state: RolloutState, boards: Mapping[str, Board]) -> list[str]:
    """Return the boards that are there and that later waves may take: they may fetch it with those of this one.

    Args:
        boards: All that serve releases, by name.
    """
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


def _await_anybody(plan: RolloutPlan, boards: Mapping[str, Board]) -> AwaitBoards:
    """Say whom a rollout waits for that has nobody to begin with."""
    pattern = plan.devices
    offline = [device for device in boards if fnmatchcase(device, pattern)]
    if offline:
        return AwaitBoards(_waiting("to come back", offline), is_deserted=True)
    if boards:
        names = _named(sorted(boards))
        return AwaitBoards(f"waiting for boards named like {pattern!r}; there are {names}", is_deserted=True)
    if plan.name == AGENT:
        return AwaitBoards("waiting for boards: none has been here whose agent tells its version", is_deserted=True)
    why = "waiting for boards that serve releases: a board does whose agent.toml has [serve], and none has been here"
    return AwaitBoards(why, is_deserted=True)


def _await_first(state: RolloutState, unproven: set[str]) -> AwaitBoards:
    """Say whom a rollout waits for after the first boards of some profiles went away."""
    missing = [
        device for device, profile in state.offered_boards.items() if profile in unproven and not _has_committed(state, device)
    ]
    why = (
        f"{_waiting('to come back', missing)}: the first boards of {_named(sorted(unproven))}, which have not committed it"
    )
    return AwaitBoards(why, is_deserted=True)


def _unproven(state: RolloutState, boards: Mapping[str, Board], candidates: Mapping[str, str]) -> set[str]:
    """Return the profiles of candidates of which no board has committed the release."""
    proven = {board.profile for board in boards.values() if board_standing(state.plan, board.status) == "committed"}
    proven |= {profile for device, profile in state.offered_boards.items() if _has_committed(state, device)}
    return set(candidates.values()) - proven


def _has_committed(state: RolloutState, device: str) -> bool:
    return board_standing(state.plan, state.statuses.get(device)) == "committed"


def _canaries(state: RolloutState, boards: Mapping[str, Board], unproven: set[str]) -> dict[str, str]:
    """Return the first boards of profiles; none of one whose first boards went away, one after the other."""
    plan, canaries = state.plan, dict[str, str]()
    for wanted in sorted(unproven):
        missing = [
            one for one, profile in state.offered_boards.items() if profile == wanted and not _has_committed(state, one)
        ]
        if len(missing) > plan.max_failures:
            continue
        fresh = (
            device
            for device, board in sorted(boards.items())
            if board.online
            and board.profile == wanted
            and device not in state.offered_boards
            and fnmatchcase(device, plan.devices)
            and board_standing(plan, board.status) != "committed"
        )
        canaries |= dict.fromkeys(list(fresh)[: plan.canary], wanted)
    return canaries


def to_take_back(state: RolloutState, boards: Mapping[str, Board]) -> list[str]:
    """Return the boards that have the release by this rollout, or are about to: those that must go back.

    A board that served nothing before has nothing to go back to, once it has committed it.
    """
    devices = []
    for device in state.offered_boards:
        status = boards[device].status if device in boards else state.statuses.get(device)
        has_it = board_standing(state.plan, status) in ("committed", "trial", "taking")
        is_first = status is not None and status.committed == state.plan.version and not status.previous
        if has_it and not is_first and state.before.get(device) != state.plan.version:
            devices.append(device)
    return devices


def _behind(state: RolloutState, boards: Mapping[str, Board]) -> tuple[str, ...]:
    """Return the boards that are away and do not stand where they are to."""
    offline = {device for device, board in boards.items() if not board.online}
    if state.mode == "going-back":
        return tuple(device for device in to_take_back(state, boards) if device in offline or device not in boards)
    offline |= state.offered_boards.keys() - boards.keys()
    if state.mode == "aborted":  # who has it keeps it, and who was never offered it lacks nothing
        affected, short = offline & state.offered_boards.keys(), {"waiting", "taking"}
    else:
        affected, short = {device for device in offline if fnmatchcase(device, state.plan.devices)}, {"waiting", "taking", "trial"}
    last = {device: boards[device].status if device in boards else state.statuses.get(device) for device in affected}
    return tuple(sorted(device for device, status in last.items() if state.stands(device, status) in short))


def _waiting(what: str, devices: list[str]) -> str:
    return f"waiting for {_named(devices)} {what}"


def _away(offered: Mapping[str, Board]) -> str:
    """Return which boards are away for a trial, and for how long they are waited for."""
    trials = [f"{device} until {board.until}" for device, board in offered.items() if board.until]
    return f"; away, and waited for: {_named(trials)}" if trials else ""


def _named(devices: list[str]) -> str:
    more = f" and {len(devices) - MOST_NAMED} more" if len(devices) > MOST_NAMED else ""
    return ", ".join(devices[:MOST_NAMED]) + more
