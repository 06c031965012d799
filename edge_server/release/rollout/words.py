"""What a rollout has to say to its boards, whatever it said before: who says it may have been killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from edge_server.journal.rollouts.state import RolloutState, board_standing
from edge_server.release.rollout.waves import Board, to_prepare, to_take_back
from shared.protocol.inference.rollout import Ahead, Offer, Withdraw

UNDER_WAY = ("waiting", "taking", "trial")
"""How boards stand that have not come to an end with it."""


class Word(NamedTuple):
    """A message for a board."""

    device: str
    message: Offer | Ahead | Withdraw


def due_words(
    state: RolloutState,
    boards: Mapping[str, Board],
    manifest: bytes,
    is_news: Callable[[str], bool],
    prepared: Mapping[str, str],
) -> list[Word]:
    """Return what the boards that are there are to hear now.

    Args:
        boards: All that serve releases, by name.
        is_news: Tells of a board that takes the release whether it, or this process, may have forgotten the offer.
        prepared: Deployments of which boards have all parts before they were offered them, by the boards' names.
    """
    if state.mode in ("going", "paused"):
        offers = _of_going(state, boards, _make_offer(state, manifest), is_news)
        return [*offers, *(Word(device, _make_ahead(state, manifest)) for device in preparing(state, boards, prepared))]
    return _of_end(state, boards, prepared)


def preparing(state: RolloutState, boards: Mapping[str, Board], prepared: Mapping[str, str]) -> list[str]:
    """Return the boards that are there and fetch the release before it is offered to them.

    Args:
        boards: All that serve releases, by name.
        prepared: Deployments of which boards have all parts before they were offered them, by the boards' names.
    """
    deployment = state.plan.deployment
    return [device for device in to_prepare(state, boards) if prepared.get(device) != deployment]


def fetching(state: RolloutState, boards: Mapping[str, Board]) -> set[str]:
    """Return the boards that are there, were offered the release, and may still ask for parts of it.

    Args:
        boards: All that serve releases, by name.
    """
    online = (device for device in state.offered_boards if device in boards and boards[device].online)
    return {device for device in online if state.stands(device, boards[device].status) in ("waiting", "taking")}


def _of_going(
    state: RolloutState, boards: Mapping[str, Board], offer: Offer, is_news: Callable[[str], bool]
) -> Iterator[Word]:
    """Yield the offer for boards that have not said how they stand with it; those that were given up are to stop."""
    for device in state.offered_boards:
        if device not in boards or not boards[device].online:
            continue
        stands = board_standing(state.plan, boards[device].status)
        if device in state.given_up:
            if stands in UNDER_WAY:
                yield Word(device, _withdrawal(state, back=True))
        elif stands == "waiting" or (stands == "taking" and is_news(device)):
            yield Word(device, offer)


def _of_end(state: RolloutState, boards: Mapping[str, Board], prepared: Mapping[str, str]) -> list[Word]:
    """Return who is to go back, and who is to fetch nothing more; what boards have of one that stopped they keep."""
    online = {device for device, board in boards.items() if board.online}
    back = {
        device for device in state.given_up if device in boards and board_standing(state.plan, boards[device].status) in UNDER_WAY
    }
    later = online - state.offered_boards.keys() if state.plan.ahead and state.offered_boards else set()
    if state.mode == "stopped":
        quiet = {device for device in later if prepared.get(device) != state.plan.deployment}
    else:
        quiet = later | fetching(state, boards)
        back |= set(to_take_back(state, boards)) if state.mode == "going-back" else set()
    messages = [Word(device, _withdrawal(state, back=True)) for device in sorted(back & online)]
    return messages + [Word(device, _withdrawal(state, back=False)) for device in sorted((quiet - back) & online)]


def _make_offer(state: RolloutState, manifest: bytes) -> Offer:
    plan = state.plan
    return Offer(
        deployment=plan.deployment,
        name=plan.name,
        version=plan.version,
        manifest=manifest,
        soak_s=plan.soak_s,
        max_drop=plan.max_drop,
        max_latency_ms=plan.max_latency_ms,
        attempt=plan.attempt,
    )


def _make_ahead(state: RolloutState, manifest: bytes) -> Ahead:
    plan = state.plan
    return Ahead(deployment=plan.deployment, name=plan.name, version=plan.version, manifest=manifest)


def _withdrawal(state: RolloutState, *, back: bool) -> Withdraw:
    plan = state.plan
    return Withdraw(deployment=plan.deployment, name=plan.name, version=plan.version, back=back)
