"""State of one gossip edge at each of its two ends (pure functions).

The end that comes first in the plan's order owns the edge and settles it; the other waits for its verdict. However
messages are lost, repeated or reordered, both settle it alike, or the other end knows that it settled without the
owner's verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LATE, UNHEARD, THEIRS = "deadline", "unheard", "other-end"
"""Causes of an off edge: the deadline passed; the owner's verdict never came; the other end gave no reason."""


@dataclass(frozen=True)
class EdgeState:
    """One end's state of an edge.

    Attributes:
        owns: Whether it is the owner.
        has: Whether the other's model is stored and checked.
        is_delivered: Whether the other end has our model.
        peer_verdict: The other end's verdict; None if unknown.
        on: This end's verdict; None while open. It never changes afterwards.
        cause: Why the edge is off, as a single word.
        is_refused: Whether something rules the edge out at this end, such as an invalid model.
    """

    owns: bool
    has: bool = False
    is_delivered: bool = False
    peer_verdict: bool | None = None
    on: bool | None = None
    cause: str = ""
    is_refused: bool = False


def receive_verdict(state: EdgeState, *, has: bool, on: bool | None, cause: str = "") -> EdgeState:
    """Return the state after a message of the other end; late earlier messages revoke nothing.

    Args:
        has: Whether the other end has our model.
        on: The other end's verdict.
        cause: Its reason for an off edge.
    """
    peer_verdict = state.peer_verdict if on is None else on
    why = state.cause if state.on is not None or peer_verdict is not False else state.cause or cause or THEIRS
    return replace(state, is_delivered=state.is_delivered or has, peer_verdict=peer_verdict, cause=why)


def receive_model(state: EdgeState) -> EdgeState:
    """Return the state after the other's model was checked and stored."""
    return replace(state, has=True)


def refuse(state: EdgeState, cause: str) -> EdgeState:
    """Return the state after something ruled the edge out; a settled edge is unchanged."""
    return state if state.on is not None else replace(state, is_refused=True, cause=cause)


def judge(state: EdgeState, *, is_late: bool) -> EdgeState:
    """Return the state, settled if that is possible now.

    Args:
        is_late: Whether this end's time is over: the deadline of the owner, twice that of the other end.
    """
    if state.on is not None:
        return state
    if state.peer_verdict is False or state.is_refused:
        return replace(state, on=False, cause=state.cause or THEIRS)
    if state.has and (state.is_delivered if state.owns else state.peer_verdict is True):
        return replace(state, on=True)
    if is_late:
        return replace(state, on=False, cause=LATE if state.owns else UNHEARD)
    return state


def is_contradicted(state: EdgeState) -> bool:
    """Return true if both ends have settled the edge differently."""
    return state.on is not None and state.peer_verdict is not None and state.on != state.peer_verdict
