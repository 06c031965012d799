"""`edge-server trial run`: a plan live, with the connected fleet or with a broker and agents on this machine."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from edge_server.journal.records import AnyRecord
from edge_server.journal.runs import edited_from, exists, make_folder, new_name, unfinished
from edge_server.journal.sqlite import read
from edge_server.plan.plan import Plan, devices, planned_data, require_there
from edge_server.plan.server_config import ServerConfig
from edge_server.plan.server_config import load as load_config
from edge_server.report.progress_bar import print_line
from edge_server.rounds.check_plan import load
from edge_server.trial.live import Watcher, serve
from edge_server.trial.local import Local, run_local
from edge_server.trial.progress import Display
from shared import registry
from shared.errors import ConfigError

Found = tuple[Path, list[AnyRecord]]


def run(options: argparse.Namespace, cancelled_by_signals: Callable[[], object]) -> Found:
    """Run a trial to its end; return the run's folder and its records. Progress is told on standard error.

    Args:
        options: `plan`; `local`: agents on this machine, 0 for those the plan names, None for whatever the plan says;
            `config`: a server's file, or None; `embedded_broker`; `data_dir` and `data_root`.
        cancelled_by_signals: Lets signals cancel the running task.

    Raises:
        ConfigError: The plan or the server's file cannot be used.
        Unreachable: The broker, or enough devices, are not there.
        TaskFailed: A process of a local trial died.
    """
    config = _config(options)
    registry.allow([*registry.allowed_entries(), *config.models])
    plan = load(options.plan, Path(config.data_root))
    if options.local is not None or (plan.local and not options.config):
        return _local(options, config, plan, cancelled_by_signals)
    if options.embedded_broker:
        raise ConfigError("--embedded-broker is for trials on this machine: give --local as well")
    return _connected(config, plan, cancelled_by_signals)


def _config(options: argparse.Namespace) -> ServerConfig:
    """Return the site; a plan and a run that a server's file names are not those of the trial."""
    config = load_config(options.config) if options.config else ServerConfig(plan="")
    return msgspec.structs.replace(config, data_dir=str(options.data_dir), data_root=str(options.data_root))


def _connected(config: ServerConfig, plan: Plan, cancelled_by_signals: Callable[[], object]) -> Found:
    data_dir = make_folder(Path(config.data_dir))
    name = unfinished(data_dir, plan) or new_name(plan)
    console = Console(stderr=True)
    display = Display(console, plan.rounds)

    async def go() -> list[AnyRecord]:
        cancelled_by_signals()
        return await serve(config, plan, name, Watcher(say, display.tell))

    def say(line: str) -> None:
        print_line(console, line)

    goes_on = ", going on with it" if exists(data_dir, name) else ""
    if not goes_on and (edited := edited_from(data_dir, plan)):
        say(f"{edited}: begins run {name}")
    say(f"{plan.name}: run {name}{goes_on}, {plan.rounds} rounds of {plan.algorithm.name}")
    with display.bar:
        try:
            return data_dir / name, asyncio.run(go())
        except asyncio.CancelledError:
            if exists(data_dir, name):
                say(f"the same command goes on with run {name}")
            raise


def _local(
    options: argparse.Namespace, config: ServerConfig, plan: Plan, cancelled_by_signals: Callable[[], object]
) -> Found:
    planned_data(plan)
    require_there(plan, Path(config.data_root))
    count = len(devices(plan, options.local or plan.local))
    local = Local(
        *(options.plan, plan, Path(config.data_root), make_folder(Path(config.data_dir)), new_name(plan), count),
        embedded=options.embedded_broker,
    )
    console = Console(stderr=True)
    display = Display(console, plan.rounds)

    async def go() -> None:
        cancelled_by_signals()
        await run_local(local, display.tell)

    print_line(console, f"{plan.name}: {count} agents, {plan.rounds} rounds of {plan.algorithm.name}")
    with display.bar:
        try:
            asyncio.run(go())
        except (asyncio.CancelledError, KeyboardInterrupt):
            print_line(console, "the broker and the agents that this command started have ended")
            if exists(local.data_dir, local.run):
                print_line(console, f"run {local.run} stays unfinished; the same command begins a new one")
            raise
    return local.folder, read(local.folder)
