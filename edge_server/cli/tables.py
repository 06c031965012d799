"""What a study came to, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from edge_server.trial.chaos.kills import KINDS
from edge_server.trial.chaos.study import Struck
from edge_server.trial.chaos.verify import Account


def kills_table(struck: Sequence[Struck]) -> Table:
    """Return one row a phase, one column a kind of victim, with sums."""
    table = Table(title="Kills", caption="for the broker: what the server did", caption_justify="left", box=None)
    table.add_column("phase")
    for heading in (*KINDS, "all"):
        table.add_column(heading, justify="right")
    counts = Counter((one.phase, one.kind) for one in struck)
    for phase in sorted({one.phase for one in struck}):
        row = [counts[phase, kind] for kind in KINDS]
        table.add_row(phase, *(str(count or "") for count in row), str(sum(row)))
    kinds = Counter(one.kind for one in struck)
    table.add_row("all", *(str(kinds[kind]) for kind in KINDS), str(len(struck)), style="bold")
    return table


def accounts_table(accounts: Sequence[Account]) -> Table:
    """Return one row a run, and their sum; what must be 0 says so."""
    table = Table(title="Runs", caption="updates: accepted/asked for; *: must be 0", caption_justify="left", box=None)
    table.padding = (0, 1, 0, 0)
    headings = (
        "updates",
        "counted twice*",
        "duplicates",
        "retrained",
        "trained twice*",
        "rounds lost*",
        "model differs*",
    )
    table.add_column("run")
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in [*accounts, total(accounts)]:
        counts = (one.counted_twice, one.duplicates, one.retrained, one.trained_twice, one.rounds_lost)
        table.add_row(one.run, f"{one.accepted}/{one.updates}", *map(str, counts), f"{one.difference:g}")
    return table


def total(accounts: Sequence[Account]) -> Account:
    """Return the sum of runs; of their differences the largest."""
    return Account(
        run="all",
        updates=sum(one.updates for one in accounts),
        accepted=sum(one.accepted for one in accounts),
        counted_twice=sum(one.counted_twice for one in accounts),
        duplicates=sum(one.duplicates for one in accounts),
        retrained=sum(one.retrained for one in accounts),
        trained_twice=sum(one.trained_twice for one in accounts),
        rounds_lost=sum(one.rounds_lost for one in accounts),
        difference=max((one.difference for one in accounts), default=0.0),
    )
