"""`edge-server chaos`: run a study of kills and print its tables."""

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
from edge_server.cli.terminal import write_text
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
from shared.runtime.text_table import TextColumn, TextTable
from shared.tensors.tree import State

SITE, RUNS, REFERENCE = "site", "runs", "reference"
"""Folders of a study: files and logs of its processes, its runs, the undisturbed run."""
BUDGET_FACTOR = 1000.0
"""Factor by which the budgets of a plan with several sites are widened."""
LEAST_DEADLINE_S = 60.0
"""Shortest deadline of a round or split step: a killed process restarts within half a second, loads torch, connects and
repeats its training or session steps, on a machine shared with all other processes."""

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
"""Counts of an account with their headings; `OF_SEVERAL` only for plans with several sites."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a study.

    Attributes:
        record: Folder of the study; the logs are in `site` below it.
        kills: Number of requested kills.
        runs: Accounts of the completed runs.
        problem: Reason why the study stopped early; empty if it did not.
        holds: Whether no run lost anything or did or counted anything twice.
        sites: Number of sites in the plan; 0 without a table `sites`.
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
    """Run a study and print its progress on standard error; all processes have ended when this returns or raises.

    Args:
        options: `plan`, `kills`, `seed`, `local`, `embedded_broker`, `data_dir` and `data_root`.
        cancelled_by_signals: Lets signals cancel the running task.

    Raises:
        ConfigError: The plan is not suitable.
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
    sites = [Site(settings, folder / SITE / name) for name, settings in locals_.items()]
    for site in sites:
        site.peers = [other for other in sites if other is not site]
    kills = deque(schedule(options.kills, options.seed, mark_tables(plan)))
    expected = predict_states(disturbed, folder / REFERENCE, options.local, partial(print_line, console))
    study = ChaosStudy(sites, kills, expected, line_printer(console, options.kills))

    async def go() -> Outcome:
        cancelled_by_signals()
        return await conduct(study, str(folder.resolve()), options.kills)

    return asyncio.run(go())


def require_possible(plan: Plan, agents: int, kills: int) -> None:
    """Refuse a plan whose model depends on timing: its bits would differ without any fault.

    Raises:
        ConfigError: A round, split step or mixing step may continue without a device of its cohort or a neighbour;
            or `kills` is negative.
    """
    if kills < 0:
        raise ConfigError(f"--kills {kills} is negative; use 0 or more")
    least = agents
    if plan.sites:
        names = [device.name for device in devices(plan)]
        if agents != len(names):
            raise ConfigError(
                f"--local {agents}: plan {plan.name!r} names the {len(names)} devices of its sites; remove --local"
            )
        least = max(map(len, devices_by_site(plan.sites, names).values()))
    if plan.round.quorum < 1 or plan.cohort.over_selection or plan.cohort.min_devices < least:
        raise ConfigError(
            f"plan {plan.name!r}: chaos compares models bit by bit, so every round must wait for every device; "
            f"set [round] quorum = 1, [cohort] over_selection = 0 and min_devices = {least}"
        )
    is_split = build(ALGORITHMS, plan.algorithm, "algorithm").split is not None
    waits = {f"round.{key}": getattr(plan.round, key) for key in ("deadline_s", *("step_deadline_s",) * is_split)}
    if plan.sites:
        waits["sites.deadline_s"] = plan.sites.deadline_s
    for key, seconds in waits.items():
        if seconds < LEAST_DEADLINE_S:
            who = "device" if key.startswith("round") else "server"
            raise ConfigError(
                f"plan {plan.name!r}: {key} = {seconds:g} is too short for a killed {who} to return, and chaos "
                f"compares models bit by bit; set {LEAST_DEADLINE_S:g} or more"
            )


def without_narrow_budgets(plan: Plan) -> Plan:
    """Widen the budgets of a plan with several sites, so that no kill exhausts them and ends the run.

    Wide budgets hardly influence decisions, so an optimizer with a deadline gets an equal part of the time budget for
    every round.
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
    """Return the marks of a plan: of one site and, with several sites, of their exchange."""
    if not plan.sites:
        return [MARKS]
    return [MARKS, MIXING, *([DECIDING] if plan.optimizer else [])]


def predict_states(plan: Plan, folder: Path, count: int, say: Callable[[str], None]) -> Expected:
    """Return a function from a run's records to the final state of an undisturbed run, by site.

    The states come from a replay. Decisions of an optimizer or a budget follow from measurements, which differ between
    live runs, so the replay takes each round's decisions (with one site also the cohort) from the disturbed journals.

    Args:
        folder: For the replay's records.
        count: Number of agents instead of the plan's devices; 0 for the plan's.
    """
    exact, number = msgspec.structs.replace(plan_for_exact_bits(plan), budget=BudgetPlan()), itertools.count(1)
    if not plan.sites and not plan.optimizer and plan.budget == BudgetPlan():
        state, _ = replay_plan(exact, folder, count)
        return lambda records: dict.fromkeys(records, state)

    def replay_recorded(records: Mapping[str, Sequence[AnyRecord]]) -> dict[str, State]:
        say("replaying the recorded decisions without kills")
        [(site, journal)] = records.items()
        opened_rounds = (record for record in drop_void(journal) if isinstance(record, RoundOpened))
        rounds = {record.round: record for record in opened_rounds if record.round <= plan.rounds}
        return {site: replay_plan(exact, folder / str(next(number)), count, recorded_rounds=rounds)[0]}

    if not plan.sites:
        return replay_recorded

    def replay_all(records: Mapping[str, Sequence[AnyRecord]]) -> dict[str, State]:
        by_site = {site: decisions(journal, plan.rounds) for site, journal in records.items()}
        target = folder / str(next(number))
        results = replay_sites(exact, {site: target / site for site in records}, decisions=by_site)
        return {site: state for site, (state, _) in results.items()}

    def with_decisions(records: Mapping[str, Sequence[AnyRecord]]) -> dict[str, State]:
        say("replaying the recorded decisions without kills")
        return replay_all(records)

    if plan.optimizer:
        return with_decisions
    states = replay_all(dict.fromkeys(plan.sites.names, ()))
    return lambda _records: states


async def conduct(study: ChaosStudy, record: str, kills: int) -> Outcome:
    """Run a study; all processes have ended when this returns or raises.

    Args:
        study: Its sites do not run yet.
        record: Folder of the study.
        kills: Number of requested kills.
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
        holds=not problem and all(account.holds for account in runs),
        sites=len(sites.names) if (sites := study.sites[0].local.plan.sites) else 0,
    )


def line_printer(console: Console, kills: int) -> Callable[[KillResult | Account], None]:
    """Return a callback that prints a line for each kill and each completed run."""
    number = itertools.count(1)

    def print_event(event: KillResult | Account) -> None:
        if isinstance(event, KillResult):
            victim = f"{event.kind} of {event.name}" if event.kind in ("agent", "trainer") else event.kind
            line = f"{next(number)}/{kills}  {event.run}  {victim}, {event.phase}"
        else:
            line = f"{event.run} ended: updates {event.accepted}/{event.updates}, difference {event.difference:g}"
            line += f", edges off {event.edges_off}" if event.edges_off else ""
        print_line(console, line)

    return print_event


def show(outcome: Outcome, stream: TextIO) -> None:
    """Write the tables and the verdict."""
    write_text(stream, [kills_table(outcome.struck), accounts_table(outcome.runs, several_sites=outcome.sites > 0)])
    if outcome.problem:
        write_text(stream, f"stopped after {len(outcome.struck)} of {outcome.kills} kills: {outcome.problem}")
    verdict = "nothing was lost" if outcome.holds else "SOMETHING WAS LOST"
    stream.write(f"{verdict}; record: {outcome.record}, logs: {outcome.record}/{SITE}\n")


def kills_table(struck: Sequence[KillResult]) -> TextTable:
    """Return the kills by phase (rows) and kind of victim (columns), with sums."""
    kinds = tuple(dict.fromkeys([*KINDS, *sorted({kill.kind for kill in struck} - set(KINDS))]))
    columns = (TextColumn("phase"), *(TextColumn(heading, right=True) for heading in (*kinds, "all")))
    rows, counts = [], Counter((kill.phase, kill.kind) for kill in struck)
    for phase in sorted({kill.phase for kill in struck}):
        row = [counts[phase, kind] for kind in kinds]
        rows.append((phase, *(str(count or "") for count in row), str(sum(row))))
    sums = Counter(kill.kind for kill in struck)
    rows.append(("all", *(str(sums[kind]) for kind in kinds), str(len(struck))))
    caption = "broker: phase of the server"
    return TextTable(columns, rows, "Kills", caption, styles={len(rows) - 1: "bold"})


def accounts_table(accounts: Sequence[Account], *, several_sites: bool = False) -> TextTable:
    """Return a row for each run (and site) and their sum; columns that must be 0 are marked."""
    counts = OF_ONE | (OF_SEVERAL if several_sites else {})
    rows = []
    for account in [*accounts, total(accounts)]:
        figures = (str(getattr(account, name)) for name in counts)
        rows.append((account.run, f"{account.accepted}/{account.updates}", *figures, f"{account.difference:g}"))
    headings = ("updates", *counts.values(), "model differs*")
    columns = (TextColumn("run"), *(TextColumn(heading, right=True) for heading in headings))
    return TextTable(
        columns,
        rows,
        "Runs",
        "updates: accepted/requested; repeated: in split rounds that a killed server restarted; *: must be 0",
    )


def total(accounts: Sequence[Account]) -> Account:
    """Return the sums over runs, and the largest difference."""
    sums = {name: sum(getattr(run, name) for run in accounts) for name in ("updates", "accepted", *OF_ONE, *OF_SEVERAL)}
    return Account(run="all", difference=max((run.difference for run in accounts), default=0.0), **sums)
