"""What is killed when: a function of the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["server", "agent", "trainer", "broker"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MARK_WITHIN_S = 0.03
"""A kill follows the mark of another process within this, mostly at once; its own mark's phase it does not outlive."""
MOMENT_WITHIN_S = 3.0
AWAY_WITHIN_S = 0.5


class Mark(NamedTuple):
    """A phase that a process enters, as it writes it into its log."""

    by: Kind
    phase: str


MARKS: Mapping[Kind, tuple[Mark, ...]] = {
    "server": (
        Mark("server", "waiting"),
        Mark("server", "opening"),
        Mark("server", "gathering"),
        Mark("agent", "delivering"),
        Mark("server", "storing"),
        Mark("server", "stored"),
        Mark("server", "accepted"),
        Mark("server", "aggregating"),
        Mark("server", "checkpointing"),
        Mark("server", "closing"),
    ),
    "agent": (
        Mark("server", "opening"),
        Mark("agent", "fetching"),
        Mark("agent", "training"),
        Mark("trainer", "committing"),
        Mark("trainer", "committed"),
        Mark("agent", "delivering"),
    ),
    "trainer": (
        Mark("agent", "fetching"),
        Mark("trainer", "training"),
        Mark("trainer", "encoding"),
        Mark("trainer", "committing"),
        Mark("trainer", "committed"),
    ),
    "broker": (
        Mark("server", "opening"),
        Mark("agent", "fetching"),
        Mark("trainer", "training"),
        Mark("agent", "delivering"),
        Mark("server", "stored"),
        Mark("server", "aggregating"),
    ),
}
"""After which marks each kind is struck. The broker says nothing, so that its marks are those of others."""


@dataclass(frozen=True)
class Kill:
    """One `kill -9`.

    Attributes:
        victim: What is killed.
        device: Which device's agent or trainer, counted round the fleet.
        mark: What is waited for first; None for a moment that has to do with nothing.
        wait_s: Seconds from the mark, or else from the kill before, to this one; 0 after a mark of the victim's own.
        away_s: Seconds until it is started again; a trainer is started by its agent.
    """

    victim: Kind
    device: int
    mark: Mark | None
    wait_s: float
    away_s: float


def schedule(kills: int, seed: int) -> list[Kill]:
    """Return `kills` kills, half of them after a mark; every mark comes once before any comes again."""
    random = Random(f"chaos/{seed}")  # noqa: S311 - a draw, not a secret
    at_marks = [True] * (kills // 2) + [False] * (kills - kills // 2)
    random.shuffle(at_marks)
    deck: list[tuple[Kind, Mark]] = []
    drawn = []
    for at_mark in at_marks:
        victim, mark, wait_s = random.choice(KINDS), None, random.uniform(0, MOMENT_WITHIN_S)
        if at_mark:
            if not deck:
                deck = [(kind, one) for kind in KINDS for one in MARKS[kind]]
                random.shuffle(deck)
            (victim, mark), wait_s = deck.pop(), MARK_WITHIN_S * random.random() ** 3
            wait_s *= mark.by != victim
        drawn.append(Kill(victim, random.randrange(1 << 16), mark, wait_s, random.uniform(0, AWAY_WITHIN_S)))
    return drawn
