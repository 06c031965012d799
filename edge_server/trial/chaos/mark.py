"""Processes that a chaos study kills, and phases that it awaits."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["server", "agent", "trainer", "broker", "coordinator"]
"""Kind of victim; the coordinator is the server of the site that coordinates at that moment."""


class Mark(NamedTuple):
    """A phase that a process enters, as in its log."""

    by: Kind
    phase: str


def process_of(kind: Kind) -> Kind:
    """Return the kind of process that is killed."""
    return "server" if kind == "coordinator" else kind
