"""One edge of one gossip, as each of its two ends knows it: pure functions of what was heard, and of the time.

The end that stands first in the plan's order owns the edge and settles it; the other one waits for its word. Whatever
is lost, said twice or in another order, both settle it alike, or the other end knows that it settled without the
owner's word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LATE, UNHEARD, THEIRS = "deadline", "unheard", "other-end"
"""Why an edge is off: the deadline passed; its owner's word never came; the other end said so without a reason."""


@dataclass(frozen=True)
class EdgeState:
    """What one end knows of an edge.

    Attributes:
        owns: Whether it is the owner.
        has: Whether the other's model is here, whole and checked.
        given: Whether the other has said that it has ours.
        heard: How the other has settled the edge, by its word; None while it has not.
        on: How it is settled here; None while it is not. Once it is, that stays.
        cause: Why it is off, one word.
        refused: Whether something rules the edge out here, such as a model that is none.
    """

    owns: bool
    has: bool = False
    given: bool = False
    heard: bool | None = None
    on: bool | None = None
    cause: str = ""
    refused: bool = False


def hear(state: EdgeState, *, has: bool, on: bool | None, cause: str = "") -> EdgeState:
    """Return the state after a word of the other end; an earlier one that comes late takes nothing back.

    Args:
        has: Whether the other end has our model.
        on: How it has settled the edge.
        cause: Why it is off there.
    """
    heard = state.heard if on is None else on
    why = state.cause if state.on is not None or heard is not False else state.cause or cause or THEIRS
    return replace(state, given=state.given or has, heard=heard, cause=why)


def receive(state: EdgeState) -> EdgeState:
    """Return the state once the other's model is here, checked and stored."""
    return replace(state, has=True)


def refuse(state: EdgeState, cause: str) -> EdgeState:
    """Return the state after something that rules the edge out; one that is settled stays as it is."""
    return state if state.on is not None else replace(state, refused=True, cause=cause)


def judge(state: EdgeState, *, is_late: bool) -> EdgeState:
    """Return the state, settled where that can be done now.

    Args:
        is_late: Whether this end's time is over: the deadline of the owner, twice that of the other end.
    """
    if state.on is not None:
        return state
    if state.heard is False or state.refused:
        return replace(state, on=False, cause=state.cause or THEIRS)
    if state.has and (state.given if state.owns else state.heard is True):
        return replace(state, on=True)
    if is_late:
        return replace(state, on=False, cause=LATE if state.owns else UNHEARD)
    return state


def differs(state: EdgeState) -> bool:
    """Tell whether both ends have settled the edge, and not alike."""
    return state.on is not None and state.heard is not None and state.on != state.heard
