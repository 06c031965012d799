"""The study from the plan to its tables.

What a study came to, as tables for people.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TextIO

import msgspec
from rich.console import Console

from edge_server.plan.plan import Plan
from edge_server.report.progress_bar import print_line
from edge_server.trial.chaos.kills import KINDS, schedule
from edge_server.trial.chaos.site import Site, sweep
from edge_server.trial.chaos.study import ChaosStudy, Struck
from edge_server.trial.chaos.verify import Account
from edge_server.trial.local import Local
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError, CorruptFile, TaskFailed, Unreachable
from shared.registry import build
from shared.runtime.text_table import TextColumn, TextTable, write_text
from shared.tensors.tree import State

SITE, RUNS, REFERENCE = "site", "runs", "reference"
"""What lies in a study's folder: the files and logs of its processes, its runs, the undisturbed one."""
LEAST_DEADLINE_S = 60.0
"""What a round, or a split step, must leave whom it waits for. One that was killed is started again within half a
second, loads torch, connects, trains anew or does the steps of its session again, on a machine that all others use."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a study came to.

    Attributes:
        record: Where everything lies; the logs in `site` below it.
        kills: How many were to be made.
        struck: Those that were.
        runs: The runs that ended.
        total: Their sum.
        problem: Why the study was cut short; empty where it was not.
        holds: Whether nothing was lost and nothing was done or counted twice, in no run.
    """

    record: str
    kills: int
    struck: list[Struck]
    runs: list[Account]
    total: Account
    problem: str
    holds: bool


def require_possible(plan: Plan, agents: int, kills: int) -> None:
    """Refuse a plan whose model depends on who is quick: it would differ without any fault.

    Args:
        plan: The plan that is to be disturbed.
        agents: How many agents are started.
        kills: How many kills are asked for.

    Raises:
        ConfigError: A round of it, or a step of a split round, may go on without a device of its cohort; or fewer than
            no kills are asked for.
    """
    if kills < 0:
        raise ConfigError(f"--kills {kills}: give 0 or more")
    if plan.round.quorum < 1 or plan.cohort.over_selection or plan.cohort.min_devices < agents:
        raise ConfigError(
            f"plan {plan.name!r}: chaos compares models bit by bit, so every round must wait for every device: "
            f"give [round] quorum = 1, [cohort] over_selection = 0 and min_devices = {agents}"
        )
    is_split = build(ALGORITHMS, plan.algorithm, "algorithm").split is not None
    for key in ("deadline_s", *("step_deadline_s",) * is_split):
        if (seconds := getattr(plan.round, key)) < LEAST_DEADLINE_S:
            raise ConfigError(
                f"plan {plan.name!r}: round.{key} = {seconds:g}: a device that was killed may not be back by then, and "
                f"chaos compares models bit by bit: give {LEAST_DEADLINE_S:g} or more"
            )


async def conduct(
    local: Local, kills: int, seed: int, expected: State, tell: Callable[[Struck | Account], None]
) -> Outcome:
    """Run the study; every process is gone when this returns or raises.

    Args:
        local: What to run; its `data_dir` is `RUNS` in the study's own folder.
        kills: How many kills.
        seed: Of what is killed when.
        expected: The state that an undisturbed run ends with.
        tell: Hears of every kill and of every run that has ended.
    """
    folder, problem = local.data_dir.parent.resolve(), ""
    site = Site(local, folder / SITE)
    study = ChaosStudy(site, deque(schedule(kills, seed)), expected, tell)
    try:
        async with site.living():
            await study.run()
    except (TaskFailed, Unreachable, TimeoutError, CorruptFile) as error:
        problem = str(error) or type(error).__name__
    finally:
        sweep(site.place)
    runs = study.accounts
    return Outcome(
        record=str(folder),
        kills=kills,
        struck=study.struck,
        runs=runs,
        total=total(runs),
        problem=problem,
        holds=not problem and all(one.holds for one in runs),
    )


def line_printer(console: Console, kills: int) -> Callable[[Struck | Account], None]:
    """Return what prints a line for every kill and for every run that has ended."""
    made = count(1)

    def tell(news: Struck | Account) -> None:
        if isinstance(news, Struck):
            what = news.kind if news.kind in ("server", "broker") else f"{news.kind} of {news.name}"
            line = f"{next(made)}/{kills}  {news.run}  {what}, {news.phase}"
        else:
            line = f"{news.run} ended: updates {news.accepted}/{news.updates}, difference {news.difference:g}"
        print_line(console, line)

    return tell


def show(outcome: Outcome, stream: TextIO) -> None:
    """Write the tables and the verdict."""
    write_text(stream, kills_table(outcome.struck), accounts_table(outcome.runs))
    if outcome.problem:
        write_text(stream, f"after {len(outcome.struck)} of {outcome.kills} kills: {outcome.problem}")
    verdict = "nothing was lost" if outcome.holds else "SOMETHING WAS LOST"
    stream.write(f"{verdict}; record: {outcome.record}, logs: {outcome.record}/{SITE}\n")


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
