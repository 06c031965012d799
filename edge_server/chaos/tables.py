"""What a study came to, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from edge_server.chaos.account import Account
from edge_server.chaos.schedule import KINDS
from edge_server.chaos.study import Struck
from shared.text_table import TextColumn, TextTable


def kills_table(struck: Sequence[Struck]) -> TextTable:
    """Return one row a phase, one column a kind of victim, with sums."""
    columns = (TextColumn("phase"), *(TextColumn(heading, right=True) for heading in (*KINDS, "all")))
    rows, counts = [], Counter((one.phase, one.kind) for one in struck)
    for phase in sorted({one.phase for one in struck}):
        row = [counts[phase, kind] for kind in KINDS]
        rows.append((phase, *(str(count or "") for count in row), str(sum(row))))
    kinds = Counter(one.kind for one in struck)
    rows.append(("all", *(str(kinds[kind]) for kind in KINDS), str(len(struck))))
    caption = "for the broker: what the server did"
    return TextTable(columns, rows, "Kills", caption, styles={len(rows) - 1: "bold"})


def accounts_table(accounts: Sequence[Account]) -> TextTable:
    """Return one row a run, and their sum; what must be 0 says so."""
    headings = (
        "updates",
        "counted twice*",
        "duplicates",
        "retrained",
        "trained twice*",
        "rounds lost*",
        "model differs*",
    )
    rows = []
    for one in [*accounts, total(accounts)]:
        counts = (one.counted_twice, one.duplicates, one.retrained, one.trained_twice, one.rounds_lost)
        rows.append((one.run, f"{one.accepted}/{one.updates}", *map(str, counts), f"{one.difference:g}"))
    columns = (TextColumn("run"), *(TextColumn(heading, right=True) for heading in headings))
    return TextTable(columns, rows, "Runs", "updates: accepted/asked for; *: must be 0")


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
