"""What each command of `edge-server` does. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared import heap, log

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.store.base import AnyRecord

logger = logging.getLogger(__name__)

EXIT_SHORT, EXIT_INTERRUPTED = 1, 130


def run(options: argparse.Namespace) -> int:
    """Run a plan with the devices of the site until it ends or a signal comes; the same command goes on with it."""
    from edge_server.config import load  # noqa: PLC0415

    config = load(options.config)
    log.configure(config.log_level)
    return asyncio.run(_serve(config))


async def _serve(config: ServerConfig) -> int:
    heap.tune()
    heap.huge_pages()
    import torch  # noqa: PLC0415

    from edge_server.history import history_of  # noqa: PLC0415
    from edge_server.run import run_plan  # noqa: PLC0415
    from edge_server.server import Server  # noqa: PLC0415
    from edge_server.store.persist import RETRY_S, persist  # noqa: PLC0415
    from edge_server.store.sqlite import SqliteStore  # noqa: PLC0415
    from edge_server.trial import plan as plans  # noqa: PLC0415
    from edge_server.trial.runs import exists, new_name, unfinished  # noqa: PLC0415
    from shared.clock import monotonic, utc_stamp  # noqa: PLC0415
    from shared.durable import explained  # noqa: PLC0415
    from shared.lock import held  # noqa: PLC0415
    from shared.presence import Session  # noqa: PLC0415
    from shared.topics import SERVER  # noqa: PLC0415
    from shared.transport.mqtt import MqttTransport  # noqa: PLC0415
    from shared.worker import in_thread  # noqa: PLC0415

    if config.threads:
        torch.set_num_threads(config.threads)
    plan = plans.load(Path(config.plan), Path(config.data_root))
    data_dir = Path(config.data_dir)
    name = config.run or unfinished(data_dir, plan) or new_name(plan)
    received = _cancelled_by_signals()
    with explained(data_dir):
        (data_dir / name).mkdir(parents=True, exist_ok=True)
    with held(data_dir / name):  # before anything is connected: a second server would throw the first off the broker
        try:
            with closing(await persist(in_thread, RETRY_S, SqliteStore, data_dir / name)) as store:
                session = Session(data_dir / "session", SERVER, config.site, uuid.uuid4().hex)
                transport = MqttTransport(config.broker, f"{config.site}.{SERVER}", session.presence)
                history = history_of(config, in_thread)
                server = Server(
                    *(config.site, transport, monotonic, in_thread),
                    keep=[history.hear],
                    was_run=lambda run: exists(data_dir, run),
                    broker=transport.connected,
                )
                async with transport.running(), history.keeping(), server.listening():
                    logger.info("run %s in %s", name, store.folder)
                    await server.reachable()
                    await run_plan(plan, name, server, store, config.link, started=utc_stamp())
                return outcome_code(store.records())
        except asyncio.CancelledError:
            logger.info("interrupted; the same command goes on with run %s", name)
            return EXIT_INTERRUPTED if signal.SIGINT in received else 0


def _cancelled_by_signals() -> set[int]:
    """Let SIGTERM and SIGINT cancel the current task; return the set of those that came."""
    task, received = asyncio.current_task(), set[int]()
    assert task

    def stop(number: int) -> None:
        if not received:  # once is enough: another would cut the clearing up short
            task.cancel()
        received.add(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return received


def outcome_code(records: Sequence[AnyRecord]) -> int:
    """Return the exit code of a run: 0 if it did all that its plan says, 1 if it ended short."""
    from edge_server.store.base import RunClosed  # noqa: PLC0415

    ends = [record.outcome for record in records if isinstance(record, RunClosed)]
    return 0 if ends[-1:] == ["finished"] else EXIT_SHORT


def runs(options: argparse.Namespace) -> int:
    """List the runs of a folder."""
    from edge_server.trial.runs import all_runs, summary  # noqa: PLC0415

    summaries = [summary(one) for one in all_runs(options.data_dir)]
    if options.format == "json":
        _print_json(summaries)
        return 0
    from rich.console import Console  # noqa: PLC0415

    from edge_server.trial.tables import runs_table  # noqa: PLC0415

    Console().print(runs_table(summaries))
    return 0


def show(options: argparse.Namespace) -> int:
    """Show the rounds of a run."""
    from edge_server.trial.runs import find  # noqa: PLC0415

    found = find(options.data_dir, options.run)
    _show(options, found.folder, found.records)
    return 0


def replay(options: argparse.Namespace) -> int:
    """Run a plan, or a recorded run again, in virtual time."""
    from edge_server.replay import command  # noqa: PLC0415
    from edge_server.trial.runs import Run  # noqa: PLC0415

    log.configure("warning")
    recorded = command.recorded(options)
    folder, records = command.play(options)
    if recorded:
        return command.compared(options, recorded, Run(folder, records))
    _show(options, folder, records)
    return outcome_code(records)


def trial(options: argparse.Namespace) -> int:
    """Run a plan live on this machine."""
    from rich.console import Console  # noqa: PLC0415

    from edge_server.store.sqlite import read  # noqa: PLC0415
    from edge_server.trial import plan as plans  # noqa: PLC0415
    from edge_server.trial.local import Local, run_local  # noqa: PLC0415
    from edge_server.trial.progress import Display  # noqa: PLC0415
    from edge_server.trial.runs import made, new_name  # noqa: PLC0415

    log.configure("warning")
    plan = plans.load(options.plan, options.data_root)
    count = len(plans.devices(plan, options.local))
    local = Local(
        *(options.plan, plan, options.data_root, made(options.data_dir), new_name(plan), count),
        embedded=options.embedded_broker,
    )
    console = Console(stderr=True)
    display = Display(console, plan.rounds)

    async def go() -> None:
        _cancelled_by_signals()
        await run_local(local, display.tell)

    console.print(f"{plan.name}: {count} agents, {plan.rounds} rounds of {plan.algorithm.name}", highlight=False)
    with display.bar:
        asyncio.run(go())
    records = read(local.folder)
    _show(options, local.folder, records)
    return outcome_code(records)


def devices(options: argparse.Namespace) -> int:
    """Show the devices of a site and what they measured last."""
    from edge_server.devices.command import show as show_devices  # noqa: PLC0415

    log.configure("warning")
    return show_devices(options)


def chaos(options: argparse.Namespace) -> int:
    """Run a plan live on this machine, kill its processes at random, compare with an undisturbed run."""
    from rich.console import Console  # noqa: PLC0415

    from edge_server.chaos import command  # noqa: PLC0415
    from edge_server.replay.__main__ import exactly, replay  # noqa: PLC0415
    from edge_server.trial import plan as plans  # noqa: PLC0415
    from edge_server.trial.local import Local  # noqa: PLC0415
    from edge_server.trial.runs import new_name  # noqa: PLC0415

    log.configure("warning")
    plan = plans.load(options.plan, options.data_root)
    count = len(plans.devices(plan, options.local))
    command.require_possible(plan, count, options.kills)
    folder = options.data_dir / new_name(plan)
    local = Local(
        *(options.plan, plan, options.data_root, folder / command.RUNS, "", count),
        embedded=options.embedded_broker,
        log_level="debug",
    )
    console = Console(stderr=True)
    console.print(f"{plan.name}: {options.kills} kills, {count} agents, seed {options.seed}", highlight=False)
    expected, _ = replay(exactly(plan), folder / command.REFERENCE, options.local)

    async def go() -> command.Outcome:
        _cancelled_by_signals()
        return await command.conduct(
            local, options.kills, options.seed, expected, command.teller(console, options.kills)
        )

    outcome = asyncio.run(go())
    if options.format == "json":
        _print_json(outcome)
    else:
        command.show(outcome, Console())
    return 0 if outcome.holds else EXIT_SHORT


def _show(options: argparse.Namespace, folder: Path, records: Sequence[AnyRecord]) -> None:
    if options.format == "json":
        from edge_server.costs import by_round  # noqa: PLC0415
        from edge_server.store.base import closed_rounds  # noqa: PLC0415

        _print_json({"record": str(folder), "rounds": closed_rounds(records), "costs": by_round(records)})
        return
    from rich.console import Console  # noqa: PLC0415

    from edge_server.trial.tables import device_lines, rounds_table  # noqa: PLC0415

    console = Console()
    console.print(rounds_table(records))
    for line in device_lines(records):
        console.print(line, highlight=False)
    console.print(f"record: {folder}", highlight=False, soft_wrap=True)


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
