"""The study from the plan to its tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TextIO

import msgspec
from rich.console import Console

from edge_server.chaos.account import Account
from edge_server.chaos.schedule import schedule
from edge_server.chaos.site import Site, sweep
from edge_server.chaos.study import Struck, Study
from edge_server.chaos.tables import accounts_table, kills_table, total
from edge_server.trial.local import Local
from edge_server.trial.plan import Plan
from edge_server.trial.progress import print_line
from shared.errors import ConfigError, CorruptFile, TaskFailed, Unreachable
from shared.text_table import write_text
from shared.tree import State

SITE, RUNS, REFERENCE = "site", "runs", "reference"
"""What lies in a study's folder: the files and logs of its processes, its runs, the undisturbed one."""


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

    Raises:
        ConfigError: A round of it may go on without a device of its cohort; or fewer than no kills are asked for.
    """
    if kills < 0:
        raise ConfigError(f"--kills {kills}: give 0 or more")
    if plan.round.quorum < 1 or plan.cohort.over_selection or plan.cohort.min_devices < agents:
        raise ConfigError(
            f"plan {plan.name!r}: chaos compares models bit by bit, so every round must wait for every device: "
            f"give [round] quorum = 1, [cohort] over_selection = 0 and min_devices = {agents}"
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
    study = Study(site, deque(schedule(kills, seed)), expected, tell)
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


def teller(console: Console, kills: int) -> Callable[[Struck | Account], None]:
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
