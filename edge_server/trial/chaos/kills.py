"""Schedule of kills: victims, moments and pauses as a function of the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import TypeAlias

from edge_server.trial.chaos.mark import Kind, Mark, process_of

MARK_WITHIN_S = 0.03
"""Longest delay after another process's mark, mostly much shorter; the victim's own phase is not outlived."""
MOMENT_WITHIN_S = 3.0
AWAY_WITHIN_S = 0.5

Marks: TypeAlias = "Mapping[Kind, tuple[Mark, ...]]"
"""Marks after which each kind is killed."""

MARKS: Marks = {
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
"""Marks of one site. The broker logs no phases, so its marks are those of others."""

KINDS: tuple[Kind, ...] = tuple(MARKS)

MIXING: Marks = {
    "server": tuple(Mark("server", phase) for phase in ("mixing", "offering", "received", "settled", "mixed")),
    "broker": tuple(Mark("server", phase) for phase in ("mixing", "offering", "received")),
}
"""Marks of mixing models between sites."""

DECIDING: Marks = {
    "server": (Mark("server", "asking"),),
    "broker": (Mark("server", "asking"), Mark("server", "leading")),
    "coordinator": tuple(Mark("server", phase) for phase in ("leading", "deciding", "decided", "opening")),
}
"""Marks of coordination between sites."""


@dataclass(frozen=True)
class Kill:
    """One `kill -9`.

    Attributes:
        device: Number of the device whose agent or trainer is killed, modulo the fleet's size; with several sites, it
            also selects the server or broker.
        mark: Phase to wait for; None for a random moment.
        wait_s: Seconds after the mark, or after the previous kill; 0 after the victim's own mark.
        away_s: Seconds until restart; trainers are restarted by their agent.
    """

    victim: Kind
    device: int
    mark: Mark | None
    wait_s: float
    away_s: float


def schedule(kills: int, seed: int, tables: Sequence[Marks] = (MARKS,)) -> list[Kill]:
    """Return `kills` kills, half of them after a mark; each mark of a table is used once before any is repeated.

    Args:
        tables: Tables of marks, used in turn.
    """
    kinds = list(dict.fromkeys(kind for table in tables for kind in table))
    random = Random(f"chaos/{seed}")  # noqa: S311 - a draw, not a secret
    at_marks = [True] * (kills // 2) + [False] * (kills - kills // 2)
    random.shuffle(at_marks)
    mark_decks: list[list[tuple[Kind, Mark]]] = [[] for _ in tables]
    turns = cycle(range(len(tables)))
    drawn = []
    for at_mark in at_marks:
        victim, mark, wait_s = random.choice(kinds), None, random.uniform(0, MOMENT_WITHIN_S)
        if at_mark:
            table = next(turns)
            if not mark_decks[table]:
                mark_decks[table] = [(kind, candidate) for kind, marks in tables[table].items() for candidate in marks]
                random.shuffle(mark_decks[table])
            (victim, mark), wait_s = mark_decks[table].pop(), MARK_WITHIN_S * random.random() ** 3
            wait_s *= mark.by != process_of(victim)
        drawn.append(Kill(victim, random.randrange(1 << 16), mark, wait_s, random.uniform(0, AWAY_WITHIN_S)))
    return drawn
