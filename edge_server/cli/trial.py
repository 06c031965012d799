"""`edge-server trial run`: run a plan live, with the fleet or on this machine.

A plan with several sites runs entirely on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from edge_server.journal.records import AnyRecord
from edge_server.journal.runs import create_runs_folder, describe_edits, find_unfinished, make_run_name, run_exists
from edge_server.journal.sqlite import read_records
from edge_server.plan.plan import Plan, devices
from edge_server.plan.server_config import ServerConfig, plugin_entries
from edge_server.plan.server_config import load as load_config
from edge_server.report.progress_bar import NewsBar, print_line
from edge_server.rounds.check_plan import load, require_one_site
from edge_server.trial import measured_budget
from edge_server.trial.live import Watcher, serve
from edge_server.trial.local import Local, prepare_local, require_resumable, run_local
from edge_server.trial.local_sites import local_sites, new_names, run_sites
from edge_server.trial.progress import Display
from shared import registry
from shared.errors import ConfigError

FinishedRun = tuple[Path, Sequence[AnyRecord]]


def run(options: argparse.Namespace, cancelled_by_signals: Callable[[], object]) -> list[FinishedRun]:
    """Run a trial to its end, with progress on standard error; return folder and records of each run.

    Args:
        options: `plan`; `local`: number of agents on this machine, 0 for the plan's devices, None for the plan's own
            setting; `config`: server's file, or None; `embedded_broker`; `data_dir` and `data_root`; `cef_share`:
            budget as a share of what the plan's baseline takes, which then runs first; None for the plan's budget.
        cancelled_by_signals: Makes signals cancel the running task.

    Raises:
        ConfigError: The plan or the server's file is invalid.
        Unreachable: The broker, or enough devices, cannot be reached.
        TaskFailed: A process of a local trial died.
    """
    config = _config(options)
    registry.allow([*registry.allowed_entries(), *plugin_entries(config)])
    plan = load(
        options.plan,
        Path(config.data_root),
        several_sites=True,
        is_resumed=lambda plan: bool(options.config and find_unfinished(Path(config.data_dir), plan)),
    )
    if options.config:
        require_one_site(plan, options.plan)
    if plan.sites or options.local is not None or (plan.local and not options.config):
        return _run_here(options, config, plan, cancelled_by_signals)
    for name in ("embedded_broker", "cef_share", "device", "run"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for trials on this machine: add --local")
    if not options.config:
        raise ConfigError(
            f"{options.plan}: neither devices nor broker are known; use --config server.toml for the "
            "devices of a site, or --local N for N agents on this machine"
        )
    return [_run_with_fleet(config, plan, cancelled_by_signals)]


def _run_here(
    options: argparse.Namespace, config: ServerConfig, plan: Plan, cancelled_by_signals: Callable[[], object]
) -> list[FinishedRun]:
    """Run a plan on this machine, after its baseline where the budget is a share of what that takes."""

    def go(plan_to_run: Plan) -> list[FinishedRun]:
        if plan_to_run.sites:
            return run_at_sites(options, config, plan_to_run, cancelled_by_signals)
        return [_local(options, config, plan_to_run, cancelled_by_signals)]

    share = options.cef_share
    if share is None:
        return go(plan)
    measured_budget.require_share(share)
    took = measured_budget.read_baseline_cost(records for _, records in go(measured_budget.make_baseline_plan(plan)))
    print_line(Console(stderr=True), measured_budget.format_budget(share, took))
    return go(measured_budget.set_budget(plan, share, took))


def _config(options: argparse.Namespace) -> ServerConfig:
    """Return the server's configuration, without the plan and run that its file names."""
    config = load_config(options.config) if options.config else ServerConfig(plan="")
    return msgspec.structs.replace(config, data_dir=str(options.data_dir), data_root=str(options.data_root))


def _run_with_fleet(config: ServerConfig, plan: Plan, cancelled_by_signals: Callable[[], object]) -> FinishedRun:
    data_dir = create_runs_folder(Path(config.data_dir))
    name = find_unfinished(data_dir, plan) or make_run_name(plan)
    console = Console(stderr=True)
    display = Display(console, plan.rounds)

    async def go() -> Sequence[AnyRecord]:
        cancelled_by_signals()
        return await serve(config, plan, name, Watcher(say, display.tell))

    def say(line: str) -> None:
        print_line(console, line)

    goes_on = ", resumed" if run_exists(data_dir, name) else ""
    if not goes_on and (edited := describe_edits(data_dir, plan)):
        say(f"{edited}: starting run {name}")
    say(f"{plan.name}: run {name}{goes_on}, {plan.rounds} rounds of {plan.algorithm.name}")
    with display.bar:
        try:
            return data_dir / name, asyncio.run(go())
        except asyncio.CancelledError:
            if run_exists(data_dir, name):
                say(f"the same command resumes run {name}")
            raise


def _local(
    options: argparse.Namespace, config: ServerConfig, plan: Plan, cancelled_by_signals: Callable[[], object]
) -> FinishedRun:
    if options.run and run_exists(Path(config.data_dir), options.run):
        require_resumable(Path(config.data_dir), options.run, plan)
    name = options.run or make_run_name(plan)
    local = _local_trial(options, config, plan, name, options.local or plan.local)
    console = Console(stderr=True)
    display = Display(console, plan.rounds)
    print_line(console, f"{plan.name}: {local.count} agents, {plan.rounds} rounds of {plan.algorithm.name}")
    _say_emulated(console, plan)
    _run_to_end(run_local(local, display.tell), [local], console, display.bar, cancelled_by_signals)
    return local.folder, read_records(local.folder)


def run_at_sites(
    options: argparse.Namespace, config: ServerConfig, plan: Plan, cancelled_by_signals: Callable[[], object]
) -> list[FinishedRun]:
    """Run a plan with sites on this machine, each with its own broker and server.

    Args:
        cancelled_by_signals: Makes signals cancel the calling task.
    """
    assert plan.sites
    count = len(devices(plan))
    if (count_given := options.local or plan.local or count) != count:
        raise ConfigError(
            f"{options.plan}: sites: {count_given} agents requested, but the plan's sites have {count} devices; "
            "remove `local` and --local"
        )
    sites = local_sites(_local_trial(options, config, plan, new_names(plan), count))
    console = Console(stderr=True)
    bar = NewsBar(console)
    displays = {site: Display(console, plan.rounds, site, bar) for site in sites}
    what = f"{count} agents at {len(sites)} sites, {plan.rounds} rounds of {plan.algorithm.name}"
    print_line(console, f"{plan.name}: {what}")
    _say_emulated(console, plan)
    going = run_sites(sites, lambda site, record: displays[site].tell(record))
    _run_to_end(going, list(sites.values()), console, bar, cancelled_by_signals)
    return [(site.folder, read_records(site.folder)) for site in sites.values()]


def _say_emulated(console: Console, plan: Plan) -> None:
    """Announce which figures are emulated by the plan."""
    if plan.emulation and plan.emulation.links:
        print_line(console, "links: emulated on loopback, with the rates and delays of the plan")
    if plan.emulation and plan.emulation.power:
        print_line(console, "joules: modelled by the plan's watts, from CPU seconds and times of transfers")


def _local_trial(options: argparse.Namespace, config: ServerConfig, plan: Plan, run: str, count: int) -> Local:
    """Return a trial on this machine with `count` agents, 0 for the plan's devices."""
    return prepare_local(
        *(plan, run),
        data_root=Path(config.data_root),
        data_dir=Path(config.data_dir),
        count=count,
        plan_path=None if options.cef_share is not None else options.plan,
        embedded=options.embedded_broker,
        device=options.device or "cpu",
    )


def _run_to_end(
    trial: Coroutine[None, None, object],
    runs: Sequence[Local],
    console: Console,
    bar: NewsBar,
    cancelled_by_signals: Callable[[], object],
) -> None:
    """Run a trial on this machine; if interrupted, report what remains."""

    async def go() -> None:
        cancelled_by_signals()
        await trial

    with bar:
        try:
            asyncio.run(go())
        except (asyncio.CancelledError, KeyboardInterrupt):
            print_line(console, "the broker and the agents that this command started have ended")
            for local in runs:
                if run_exists(local.data_dir, local.run):
                    print_line(console, f"run {local.run} stays unfinished; {_resume_hint(local)}")
            raise


def _resume_hint(local: Local) -> str:
    return "the same command starts a new one" if local.plan.sites else f"`--run {local.run}` resumes it"
