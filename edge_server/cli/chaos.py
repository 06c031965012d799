"""The study from the plan to its tables.

What a study came to, as tables for people.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console

from edge_server.allocation.coordinator import convert_options
from edge_server.journal.records import AnyRecord, RoundOpened, drop_void
from edge_server.journal.runs import create_runs_folder, make_run_name
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.plan import Plan, devices
from edge_server.plan.sites import devices_by_site
from edge_server.replay.run import plan_for_exact_bits, replay_plan, replay_sites
from edge_server.report.progress_bar import print_line
from edge_server.rounds.check_plan import load
from edge_server.trial.chaos.kills import DECIDING, KINDS, MARKS, MIXING, Marks, schedule
from edge_server.trial.chaos.site import Site, sweep
from edge_server.trial.chaos.study import ChaosStudy, Expected, KillResult
from edge_server.trial.chaos.verify import Account, decisions
from edge_server.trial.local import Local
from edge_server.trial.local_sites import local_sites
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError, CorruptFile, TaskFailed, Unreachable
from shared.registry import build
from shared.runtime.text_table import TextColumn, TextTable, write_text
from shared.tensors.tree import State

SITE, RUNS, REFERENCE = "site", "runs", "reference"
"""What lies in a study's folder: the files and logs of its processes, its runs, the undisturbed one."""
BUDGET_FACTOR = 1000.0
"""How much wider the budgets of a disturbed plan of several sites are."""
LEAST_DEADLINE_S = 60.0
"""What a round, or a split step, must leave whom it waits for. One that was killed is started again within half a
second, loads torch, connects, trains anew or does the steps of its session again, on a machine that all others use."""

OF_ONE = {
    "counted_twice": "counted twice*",
    "duplicates": "duplicates",
    "retrained": "retrained",
    "repeated": "repeated",
    "trained_twice": "trained twice*",
    "rounds_lost": "rounds lost*",
}

OF_SEVERAL = {
    "edges_off": "edges off*",
    "undecided": "undecided*",
    "overdrawn": "overdrawn*",
    "alone": "decided alone",
    "terms": "terms",
}
"""Counts of an account and their headings; those of several sites stand where there are such."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a study came to.

    Attributes:
        record: Where everything lies; the logs in `site` below it.
        kills: How many were to be made.
        runs: The runs that ended.
        problem: Why the study was cut short; empty where it was not.
        holds: Whether nothing was lost and nothing was done or counted twice, in no run.
        sites: How many the plan has; 0 where it has no such table.
    """

    record: str
    kills: int
    struck: list[KillResult]
    runs: list[Account]
    total: Account
    problem: str
    holds: bool
    sites: int = 0


def run(options: argparse.Namespace, cancelled_by_signals: Callable[[], object]) -> Outcome:
    """Run a study; every process is gone when this returns or raises. Progress is told on standard error.

    Args:
        options: `plan`, `kills`, `seed`, `local`, `embedded_broker`, `data_dir` and `data_root`.
        cancelled_by_signals: Lets signals cancel the running task.

    Raises:
        ConfigError: The plan cannot be used for this.
    """
    data_root = options.data_root
    plan = load(options.plan, data_root, several_sites=True)
    agents, folder = len(devices(plan, options.local)), create_runs_folder(options.data_dir) / make_run_name(plan)
    require_possible(plan, agents, options.kills)
    disturbed = without_narrow_budgets(plan)
    local = Local(
        *(options.plan, disturbed, data_root, folder / RUNS, "", agents),
        embedded=options.embedded_broker,
        log_level="debug",
        writes_plan=disturbed is not plan,
    )
    locals_ = local_sites(replace(local, run=plan.name)) if plan.sites else {"": local}
    console = Console(stderr=True)
    where = f" at {len(locals_)} sites" if plan.sites else ""
    print_line(console, f"{plan.name}: {options.kills} kills, {agents} agents{where}, seed {options.seed}")
    sites = [Site(one, folder / SITE / site) for site, one in locals_.items()]
    for site in sites:
        site.peers = [other for other in sites if other is not site]
    kills = deque(schedule(options.kills, options.seed, mark_tables(plan)))
    expected = undisturbed(disturbed, folder / REFERENCE, options.local, partial(print_line, console))
    study = ChaosStudy(sites, kills, expected, line_printer(console, options.kills))

    async def go() -> Outcome:
        cancelled_by_signals()
        return await conduct(study, str(folder.resolve()), options.kills)

    return asyncio.run(go())


def require_possible(plan: Plan, agents: int, kills: int) -> None:
    """Refuse a plan whose model depends on who is quick: it would differ without any fault.

    Args:
        plan: The plan that is to be disturbed.
        agents: How many agents are started.
        kills: How many kills are asked for.

    Raises:
        ConfigError: A round of it, a step of a split round or a mixing of sites may go on without a device of its
            cohort, or a neighbour; or fewer than no kills are asked for.
    """
    if kills < 0:
        raise ConfigError(f"--kills {kills}: give 0 or more")
    least = agents
    if plan.sites:
        names = [one.name for one in devices(plan)]
        if agents != len(names):
            raise ConfigError(
                f"--local {agents}: plan {plan.name!r} names the {len(names)} devices of its sites; leave it out"
            )
        least = max(map(len, devices_by_site(plan.sites, names).values()))
    if plan.round.quorum < 1 or plan.cohort.over_selection or plan.cohort.min_devices < least:
        raise ConfigError(
            f"plan {plan.name!r}: chaos compares models bit by bit, so every round must wait for every device: "
            f"give [round] quorum = 1, [cohort] over_selection = 0 and min_devices = {least}"
        )
    is_split = build(ALGORITHMS, plan.algorithm, "algorithm").split is not None
    waits = {f"round.{key}": getattr(plan.round, key) for key in ("deadline_s", *("step_deadline_s",) * is_split)}
    if plan.sites:
        waits["sites.deadline_s"] = plan.sites.deadline_s
    for key, seconds in waits.items():
        if seconds < LEAST_DEADLINE_S:
            who = "device" if key.startswith("round") else "server"
            raise ConfigError(
                f"plan {plan.name!r}: {key} = {seconds:g}: a {who} that was killed may not be back by then, and "
                f"chaos compares models bit by bit: give {LEAST_DEADLINE_S:g} or more"
            )


def without_narrow_budgets(plan: Plan) -> Plan:
    """Return a plan of several sites whose budgets no kill exhausts: they would end its run, or leave devices out.

    What is decided would hardly depend on such budgets, so an optimizer that knows deadlines gets the even part of the
    seconds for every round, whatever earlier ones took.
    """
    budget, table = plan.budget, plan.optimizer
    if not plan.sites or budget == BudgetPlan():
        return plan
    wide = {key: value * BUDGET_FACTOR for key, value in msgspec.structs.asdict(budget).items() if value}
    if table and budget.time_s and getattr(convert_options(table), "deadline_s", 0.0) is None:
        even = {"deadline_s": budget.time_s / plan.rounds}
        table = msgspec.structs.replace(table, options=table.options | even)
    return msgspec.structs.replace(plan, budget=BudgetPlan(**wide), optimizer=table)


def mark_tables(plan: Plan) -> list[Marks]:
    """Return the marks of a plan: those of one site and, where it has several, those between them."""
    if not plan.sites:
        return [MARKS]
    return [MARKS, MIXING, *([DECIDING] if plan.optimizer else [])]


def undisturbed(plan: Plan, folder: Path, count: int, say: Callable[[str], None]) -> Expected:
    """Return what gives the states that an undisturbed run ends with: a replay's, of each site.

    What an optimizer or a budget decides follows from what was measured, and no two live runs measure the same. So the
    replay decides nothing: it takes every round's decision from the disturbed run's journals, where there is one site
    with the devices that were drawn.

    Args:
        folder: For the replay's records.
        count: Agents in place of the plan's devices; 0 for these.
    """
    exact, number = msgspec.structs.replace(plan_for_exact_bits(plan), budget=BudgetPlan()), itertools.count(1)
    if not plan.sites and not plan.optimizer and plan.budget == BudgetPlan():
        state, _ = replay_plan(exact, folder, count)
        return lambda records: dict.fromkeys(records, state)

    def told_again(records: Mapping[str, Sequence[AnyRecord]]) -> dict[str, State]:
        say("replaying without kills what was decided")
        [(site, own)] = records.items()
        told = {one.round: one for one in drop_void(own) if isinstance(one, RoundOpened) and one.round <= plan.rounds}
        return {site: replay_plan(exact, folder / str(next(number)), count, recorded_rounds=told)[0]}

    if not plan.sites:
        return told_again

    def replayed(records: Mapping[str, Sequence[AnyRecord]]) -> dict[str, State]:
        decided = {site: decisions(own, plan.rounds) for site, own in records.items()}
        place = folder / str(next(number))
        ended = replay_sites(exact, {site: place / site for site in records}, decisions=decided)
        return {site: state for site, (state, _) in ended.items()}

    def with_decisions(records: Mapping[str, Sequence[AnyRecord]]) -> dict[str, State]:
        say("replaying without kills what was decided")
        return replayed(records)

    if plan.optimizer:
        return with_decisions
    states = replayed(dict.fromkeys(plan.sites.names, ()))
    return lambda _records: states


async def conduct(study: ChaosStudy, record: str, kills: int) -> Outcome:
    """Run a study; every process is gone when this returns or raises.

    Args:
        study: Of sites none of which runs yet.
        record: Where all of it lies.
        kills: How many were asked for.
    """
    problem = ""
    try:
        async with AsyncExitStack() as stack:
            for site in study.sites:
                await stack.enter_async_context(site.living())
            await study.run()
    except (TaskFailed, Unreachable, TimeoutError, CorruptFile) as error:
        problem = str(error) or type(error).__name__
    finally:
        for site in study.sites:
            sweep(site.place)
    runs = study.accounts
    return Outcome(
        record=record,
        kills=kills,
        struck=study.struck,
        runs=runs,
        total=total(runs),
        problem=problem,
        holds=not problem and all(one.holds for one in runs),
        sites=len(sites.names) if (sites := study.sites[0].local.plan.sites) else 0,
    )


def line_printer(console: Console, kills: int) -> Callable[[KillResult | Account], None]:
    """Return what prints a line for every kill and for every run that has ended."""
    made = itertools.count(1)

    def tell(news: KillResult | Account) -> None:
        if isinstance(news, KillResult):
            what = f"{news.kind} of {news.name}" if news.kind in ("agent", "trainer") else news.kind
            line = f"{next(made)}/{kills}  {news.run}  {what}, {news.phase}"
        else:
            line = f"{news.run} ended: updates {news.accepted}/{news.updates}, difference {news.difference:g}"
            line += f", edges off {news.edges_off}" if news.edges_off else ""
        print_line(console, line)

    return tell


def show(outcome: Outcome, stream: TextIO) -> None:
    """Write the tables and the verdict."""
    write_text(stream, kills_table(outcome.struck), accounts_table(outcome.runs, several_sites=outcome.sites > 0))
    if outcome.problem:
        write_text(stream, f"after {len(outcome.struck)} of {outcome.kills} kills: {outcome.problem}")
    verdict = "nothing was lost" if outcome.holds else "SOMETHING WAS LOST"
    stream.write(f"{verdict}; record: {outcome.record}, logs: {outcome.record}/{SITE}\n")


def kills_table(struck: Sequence[KillResult]) -> TextTable:
    """Return one row a phase, one column a kind of victim, with sums."""
    kinds = tuple(dict.fromkeys([*KINDS, *sorted({one.kind for one in struck} - set(KINDS))]))
    columns = (TextColumn("phase"), *(TextColumn(heading, right=True) for heading in (*kinds, "all")))
    rows, counts = [], Counter((one.phase, one.kind) for one in struck)
    for phase in sorted({one.phase for one in struck}):
        row = [counts[phase, kind] for kind in kinds]
        rows.append((phase, *(str(count or "") for count in row), str(sum(row))))
    sums = Counter(one.kind for one in struck)
    rows.append(("all", *(str(sums[kind]) for kind in kinds), str(len(struck))))
    caption = "for the broker: what the server did"
    return TextTable(columns, rows, "Kills", caption, styles={len(rows) - 1: "bold"})


def accounts_table(accounts: Sequence[Account], *, several_sites: bool = False) -> TextTable:
    """Return one row a run, of several sites one a site's, and their sum; what must be 0 says so."""
    counts = OF_ONE | (OF_SEVERAL if several_sites else {})
    rows = []
    for one in [*accounts, total(accounts)]:
        figures = (str(getattr(one, name)) for name in counts)
        rows.append((one.run, f"{one.accepted}/{one.updates}", *figures, f"{one.difference:g}"))
    headings = ("updates", *counts.values(), "model differs*")
    columns = (TextColumn("run"), *(TextColumn(heading, right=True) for heading in headings))
    return TextTable(
        columns,
        rows,
        "Runs",
        "updates: accepted/asked for; repeated: in split rounds that a killed server began anew; *: must be 0",
    )


def total(accounts: Sequence[Account]) -> Account:
    """Return the sum of runs; of their differences the largest."""
    sums = {name: sum(getattr(one, name) for one in accounts) for name in ("updates", "accepted", *OF_ONE, *OF_SEVERAL)}
    return Account(run="all", difference=max((one.difference for one in accounts), default=0.0), **sums)
