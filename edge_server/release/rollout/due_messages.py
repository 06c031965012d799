"""Messages due to each board of a rollout, derived from its state.

They do not depend on what was sent before, so that a rollout whose process was killed can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from edge_server.journal.rollouts.file import RolloutPlan
from edge_server.journal.rollouts.state import RolloutState, board_standing
from edge_server.release.rollout.waves import Boards, boards_to_prefetch, boards_to_roll_back
from shared.protocol.inference.rollout import Ahead, Offer, Withdraw

UNDER_WAY = ("waiting", "taking", "trial")
"""Standings of boards that have neither committed the release nor failed."""


class BoardMessage(NamedTuple):
    """A message to a board."""

    device: str
    message: Offer | Ahead | Withdraw


def due_messages(
    state: RolloutState,
    boards: Boards,
    manifest: bytes,
    forgot_offer: Callable[[str], bool],
    prepared: Mapping[str, str],
) -> list[BoardMessage]:
    """Return the messages due now to online boards.

    Args:
        forgot_offer: Returns whether a board that is taking the release may not know the offer, after a restart.
        prepared: Deployment whose parts a board has prefetched completely, by device name.
    """
    if state.mode in ("going", "paused"):
        ahead = Ahead(**_identify(state.plan), manifest=manifest)
        prefetches = [BoardMessage(device, ahead) for device in boards_prefetching(state, boards, prepared)]
        return [*_active_messages(state, boards, _make_offer(state.plan, manifest), forgot_offer), *prefetches]
    return _closing_messages(state, boards, prepared)


def boards_prefetching(state: RolloutState, boards: Boards, prepared: Mapping[str, str]) -> list[str]:
    """Return the online boards that should prefetch the release before their wave.

    Args:
        prepared: Deployment whose parts a board has prefetched completely, by device name.
    """
    deployment = state.plan.deployment
    return [device for device in boards_to_prefetch(state, boards) if prepared.get(device) != deployment]


def boards_fetching(state: RolloutState, boards: Boards) -> set[str]:
    """Return the online boards that were offered the release and may still request parts."""
    online = (device for device in state.offered_boards if device in boards and boards[device].online)
    return {device for device in online if state.stands(device, boards[device].status) in ("waiting", "taking")}


def _active_messages(
    state: RolloutState, boards: Boards, offer: Offer, forgot_offer: Callable[[str], bool]
) -> Iterator[BoardMessage]:
    """Yield the offer for boards that have not acknowledged it, and a withdrawal for those given up."""
    for device in state.offered_boards:
        if device not in boards or not boards[device].online:
            continue
        stands = board_standing(state.plan, boards[device].status)
        if device in state.given_up:
            if stands in UNDER_WAY:
                yield _withdraw(state.plan, device, back=True)
        elif stands == "waiting" or (stands == "taking" and forgot_offer(device)):
            yield BoardMessage(device, offer)


def _closing_messages(state: RolloutState, boards: Boards, prepared: Mapping[str, str]) -> list[BoardMessage]:
    """Return the withdrawals of a rollout that has ended; after a stop, boards keep a release that they have."""
    online = {device for device, board in boards.items() if board.online}
    given_up = state.given_up.keys() & boards.keys()
    back = {device for device in given_up if board_standing(state.plan, boards[device].status) in UNDER_WAY}
    later = online - state.offered_boards.keys() if state.plan.ahead and state.offered_boards else set()
    if state.mode == "stopped":
        quiet = {device for device in later if prepared.get(device) != state.plan.deployment}
    else:
        quiet = later | boards_fetching(state, boards)
        back |= set(boards_to_roll_back(state, boards)) if state.mode == "going-back" else set()
    messages = [_withdraw(state.plan, device, back=True) for device in sorted(back & online)]
    return messages + [_withdraw(state.plan, device, back=False) for device in sorted((quiet - back) & online)]


def _make_offer(plan: RolloutPlan, manifest: bytes) -> Offer:
    terms: dict[str, Any] = {"soak_s": plan.soak_s, "max_drop": plan.max_drop, "max_latency_ms": plan.max_latency_ms}
    return Offer(**_identify(plan), manifest=manifest, attempt=plan.attempt, **terms)


def _withdraw(plan: RolloutPlan, device: str, *, back: bool) -> BoardMessage:
    return BoardMessage(device, Withdraw(**_identify(plan), back=back))


def _identify(plan: RolloutPlan) -> dict[str, Any]:
    return {"deployment": plan.deployment, "name": plan.name, "version": plan.version}
