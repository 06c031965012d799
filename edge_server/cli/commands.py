"""Entry functions of the `edge-server` commands, with deferred heavy imports."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli import folders
from edge_server.cli.gateway import arguments as gateway_commands
from edge_server.cli.terminal import write_text
from edge_server.plan.data_folder import check_data_folder, default_data_root
from shared import registry
from shared.config_reference import add_format, write_reference
from shared.errors import ConfigError
from shared.runtime import processes
from shared.runtime.command_line import add_command
from shared.runtime.processes import loading
from shared.runtime.service import notify_supervisor
from shared.runtime.text_table import terminal_columns

if TYPE_CHECKING:
    from edge_server.journal.records import AnyRecord
    from edge_server.plan.server_config import ServerConfig
    from edge_server.trial.job_runner import ConfiguredRun

logger = logging.getLogger(__name__)

EXIT_INCOMPLETE, EXIT_INTERRUPTED = 1, 130


def run(options: argparse.Namespace) -> int:
    """Run the plan and the queue of a site with its devices; the same command resumes interrupted runs."""
    from edge_server.journal.plan_queue import PlanQueue  # noqa: PLC0415
    from edge_server.plan.server_config import load, plugin_entries  # noqa: PLC0415

    with loading():
        from edge_server.cli.configured_run import choose_run  # noqa: PLC0415

    config = load(options.config)
    check_data_folder(Path(config.data_dir))
    processes.configure(config.log_level, options.verbose)
    registry.allow([*registry.allowed_entries(), *plugin_entries(config)])
    queue = PlanQueue(Path(config.data_dir), config.site)
    configured, ended = choose_run(config, options.config, queue, again=options.again)
    has_jobs = any(job.state != "ended" for job in queue.list_jobs())
    if not (configured or has_jobs or options.wait):
        if ended is None:
            raise ConfigError(
                f"{options.config}: plan is missing and the queue is empty; add it, submit one, or --wait"
            )
        return outcome_code(ended.records)
    command = f"edge-server run --config {options.config}"
    return asyncio.run(serve_runs(config, configured, command, waits=options.wait))


async def serve_runs(
    config: ServerConfig, configured: ConfiguredRun | None, command: str, *, waits: bool = False
) -> int:
    """Serve a run and the queue under systemd's supervision, and report each outcome; return the exit code.

    Args:
        configured: Run of the plan that the server's file names; None if it has ended.
        command: Command line that resumes the runs.
        waits: Whether to wait for jobs when the queue is empty.
    """
    from edge_server.journal.plan_queue import PlanQueue  # noqa: PLC0415
    from edge_server.journal.runs import run_exists  # noqa: PLC0415
    from edge_server.trial.job_runner import JobRunner, expected_devices  # noqa: PLC0415
    from edge_server.trial.live import connect_site  # noqa: PLC0415

    received, queue = _cancelled_by_signals(), PlanQueue(Path(config.data_dir), config.site)
    try:
        expected = expected_devices(config, configured, queue.list_jobs())
        async with notify_supervisor(), connect_site(config, expected) as site:
            runner = JobRunner(site, queue, partial(_report_run, config), waits)
            await runner.run(configured)
    except asyncio.CancelledError:
        runs = [job.run for job in queue.list_jobs() if job.state == "running"]
        if configured and (config.run or run_exists(Path(config.data_dir), configured.name)):
            runs.insert(0, configured.name)
        if runs:
            logger.info("interrupted; `%s` resumes run %s", command, ", ".join(runs))
        return EXIT_INTERRUPTED if signal.SIGINT in received else 0
    return 0 if runner.is_complete else EXIT_INCOMPLETE


def _report_run(config: ServerConfig, name: str, records: Sequence[AnyRecord]) -> bool:
    """Log the outcome of a run; return whether it completed its plan."""
    from edge_server.journal.outcome import outcome_lines, summarise_outcome  # noqa: PLC0415
    from edge_server.trial.tables import failure_lines  # noqa: PLC0415

    for line in filter(None, [*failure_lines(records), explain_shortfall(records)]):
        logger.warning("run %s: %s", name, line)
    folder = Path(config.data_dir) / name
    for line in outcome_lines(summarise_outcome(records, folder), folder):
        logger.info("run %s: %s", name, line)
    return outcome_code(records) == 0


def _cancelled_by_signals() -> set[int]:
    """Make SIGTERM and SIGINT cancel the current task; return the set of received signals."""
    task, received = asyncio.current_task(), set[int]()
    assert task

    def stop(number: int) -> None:
        if not received:  # a second cancellation would interrupt the cleanup
            task.cancel()
        received.add(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return received


def outcome_code(records: Sequence[AnyRecord]) -> int:
    """Return the exit code of a run: 0 if it completed its plan, 1 if it ended early."""
    return EXIT_INCOMPLETE if explain_shortfall(records) else 0


def explain_shortfall(records: Sequence[AnyRecord]) -> str:
    """Return why a run falls short of its plan: it ended early, or never had a model; empty if it does not."""
    from edge_server.journal.records import RoundClosed, RunClosed, RunOpened, first, valid_records  # noqa: PLC0415

    end = first(records, RunClosed)
    if not end:
        return "it has not ended"
    outcomes = Counter(closed.outcome for closed in valid_records(records, RoundClosed))
    rounds, missed = outcomes.total(), outcomes["missed"]
    if end.outcome == "refused":
        return f"ended after {rounds} rounds: every device has refused its task permanently, for the causes above"
    if end.outcome != "finished":
        return f"ended early after {rounds} rounds: {end.cause}"
    if missed == rounds:
        return "no round had enough updates, the model is unchanged; check the devices' links and logs, and [round]"
    opening = first(records, RunOpened)
    most = opening.plan.round.most_missed if opening else 1.0
    if missed > most * rounds:
        share = f"{missed} of {rounds} rounds were missed, more than round.most_missed = {most:g} of them"
        return f'{share}; check the devices\' links and logs, or repeat such rounds by round.on_missed = "retry"'
    return ""


def show(options: argparse.Namespace) -> int:
    """Show the rounds of a run."""
    from edge_server.journal.runs import find_run  # noqa: PLC0415

    run = find_run(options.data_dir, options.run)
    _show(options, run.folder, run.records, each_device=options.devices)
    return 0


def explain(options: argparse.Namespace) -> int:
    """Explain the decisions of a round."""
    from edge_server.allocation.explain import explain as explained  # noqa: PLC0415
    from edge_server.allocation.explanation_text import explanation_lines  # noqa: PLC0415
    from edge_server.journal.runs import find_run  # noqa: PLC0415
    from edge_server.plan.sites import parse_round  # noqa: PLC0415

    run = find_run(options.data_dir, options.run)
    number = parse_round(options.round, run.opened.plan.sites if run.opened else msgspec.UNSET)
    explanation = explained(run.records, number, options.device)
    if options.format == "json":
        _print_json(explanation)
    else:
        write_text(sys.stdout, explanation_lines(explanation))
    return 0


def replay(options: argparse.Namespace) -> int:
    """Run a plan, or replay a recorded run, in virtual time."""
    from edge_server.journal.runs import StoredRun  # noqa: PLC0415

    with loading():
        from edge_server.cli import replay as command  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    recorded = command.find_recorded(options)
    runs = command.run_command(options)
    if recorded:
        return command.compare_with_recorded(options, recorded, [StoredRun(*run) for run in runs])
    _show_all(options, runs)
    return max(outcome_code(records) for _, records in runs)


def trial(options: argparse.Namespace) -> int:
    """Run a plan live, with the connected devices or on this machine."""
    with loading():
        from edge_server.cli.trial import run as run_trial  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    runs = run_trial(options, _cancelled_by_signals)
    _show_all(options, runs)
    return max(outcome_code(records) for _, records in runs)


def flower_app(options: argparse.Namespace) -> int:
    """Write the plan of a Flower app, and run it with agents, on boards or in virtual time."""
    with loading():
        from edge_server.cli.flower_app import prepare  # noqa: PLC0415
        from edge_server.cli.trial import run as run_trial  # noqa: PLC0415
        from edge_server.replay.run import run_replay  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    plan_path = prepare(options)
    sys.stdout.write(f"plan: {plan_path}\n")
    if options.write_only:
        return 0
    if options.replay:
        runs = run_replay(plan_path, options.data_root, options.data_dir, 0)
    else:
        local = None if options.config else 0
        trial_options = {"plan": plan_path, "local": local, "cef_share": None, "device": None}
        runs = run_trial(argparse.Namespace(**{**vars(options), **trial_options}), _cancelled_by_signals)
    _show_all(options, runs)
    return max(outcome_code(records) for _, records in runs)


def devices(options: argparse.Namespace) -> int:
    """Show the devices of a site and their latest measurements; `approve` and `forget` act on one."""
    verb = gateway_commands.device_verb(options)
    if verb == gateway_commands.APPROVE:
        return gateway_commands.approve(options)
    from edge_server.cli.devices import forget_device, show_devices  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    return forget_device(options) if verb else show_devices(options)


def rollout(options: argparse.Namespace) -> int:
    """Start, watch or control a rollout."""
    from edge_server.cli.releases.rollout import rollout as run_rollout  # noqa: PLC0415

    return run_rollout(options, _cancelled_by_signals)


def models(options: argparse.Namespace) -> int:
    """List the models, or show the cuts of one."""
    with loading():
        from edge_server.cli.models import show_models  # noqa: PLC0415

    return show_models(options)


def setup(options: argparse.Namespace) -> int:
    """Install what a server needs beside its package."""
    from shared.runtime.support.command import set_up  # noqa: PLC0415

    return set_up("server", options, lambda line: write_text(sys.stdout, line))


def chaos(options: argparse.Namespace) -> int:
    """Run a plan live on this machine, kill its processes at random, compare with an undisturbed run."""
    with loading():
        from edge_server.cli import chaos as command  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    outcome = command.run(options, _cancelled_by_signals)
    if options.format == "json":
        _print_json(outcome)
    else:
        command.show(outcome, sys.stdout)
    return 0 if outcome.holds else EXIT_INCOMPLETE


def _show_all(options: argparse.Namespace, runs: Sequence[tuple[Path, Sequence[AnyRecord]]]) -> None:
    """Show each run below its name; several runs as one JSON array."""
    if len(runs) == 1:
        _show(options, *runs[0])
    elif options.format == "json":
        _print_json([_run_json(folder, records) for folder, records in runs])
    else:
        for folder, records in runs:
            sys.stdout.write(f"\n{folder.name}\n")
            _show(options, folder, records)
        from edge_server.journal.runs import StoredRun, name_of_sites  # noqa: PLC0415
        from edge_server.sites.overview import accuracy_line  # noqa: PLC0415

        write_text(sys.stdout, accuracy_line({folder.name: records for folder, records in runs}))
        if common := name_of_sites(StoredRun(runs[0][0], list(runs[0][1]))):
            sys.stdout.write(f"all sites: edge-server report {common} --data-dir {options.data_dir}\n")


def _run_json(folder: Path, records: Sequence[AnyRecord]) -> dict[str, object]:
    """Return the JSON content of a run."""
    from edge_server.journal.costs import costs_by_round  # noqa: PLC0415
    from edge_server.journal.outcome import summarise_outcome  # noqa: PLC0415
    from edge_server.journal.records import RunOpened, closed_rounds, first  # noqa: PLC0415

    opening = first(records, RunOpened)
    plugins = {"plugins": opening.plugins} if opening and opening.plugins else {}
    short = {"short": why} if (why := explain_shortfall(records)) else {}
    rounds = {"rounds": closed_rounds(records), "costs": dict(costs_by_round(records))}
    return {"record": str(folder), "outcome": summarise_outcome(records, folder), **plugins, **short, **rounds}


def _show(
    options: argparse.Namespace, folder: Path, records: Sequence[AnyRecord], *, each_device: bool = False
) -> None:
    from edge_server.journal.outcome import outcome_lines, summarise_outcome  # noqa: PLC0415

    if options.format == "json":
        _print_json(_run_json(folder, records))
        return
    outcome = summarise_outcome(records, folder)
    from edge_server.trial import tables  # noqa: PLC0415

    table = tables.rounds_table(records, each_device=each_device, width=terminal_columns(sys.stdout))
    device_notes = tables.device_lines(records), tables.failure_lines(records), tables.missed_lines(records)
    skipped = [*tables.skipped_lines(records), *tables.gpu_lines(records)]
    notes = [*chain.from_iterable(device_notes), *skipped, *tables.restart_lines(records), explain_shortfall(records)]
    write_text(sys.stdout, [table, *filter(None, notes)])
    *lines, what_next, record = outcome_lines(outcome, folder)
    write_text(sys.stdout, lines)
    sys.stdout.write(f"{what_next}\n{record}\n")  # paths, not wrapped, for copying


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server plan`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = add_command(
        verbs, "check", "validate a plan and its data on this machine; show the mixing weights of several sites"
    )
    check.add_argument("plan", type=Path, metavar="PLAN", help="plan file")
    check.add_argument("--data-root", type=Path, metavar="DIR", help=folders.DATA_ROOT_HELP)
    help_ = "server.toml: allows its `models` and sets the folder of data sets"
    check.add_argument("--config", type=Path, metavar="FILE", help=help_)
    check.add_argument("--format", choices=("table", "json"), default="table", help="default: %(default)s")
    schema = add_command(verbs, "schema", "print the reference of all keys of a plan: type, unit, default, meaning")
    add_format(schema, "edge_server/plan/REFERENCE.md")


def plan(options: argparse.Namespace) -> int:
    """Check a plan, or print the reference of its keys."""
    return _check_plan(options) if options.verb == "check" else _print_keys(options)


def _check_plan(options: argparse.Namespace) -> int:
    with loading():
        from edge_server.cli.plan.check import check_plan, format_check  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    data_root = default_data_root()
    if options.config:
        from edge_server.plan.server_config import load, plugin_entries  # noqa: PLC0415

        config = load(options.config)
        registry.allow([*registry.allowed_entries(), *plugin_entries(config)])
        data_root = Path(config.data_root)
    checked = check_plan(options.plan, options.data_root or data_root)
    if options.format == "json":
        _print_json(checked)
    else:
        write_text(sys.stdout, format_check(checked))
    return 0


def _print_keys(options: argparse.Namespace) -> int:
    from edge_server.cli.plan.reference import INTRODUCTION, plan_keys  # noqa: PLC0415
    from edge_server.cli.plan.schema import plan_schema  # noqa: PLC0415 - torch, for the builders' options

    write_reference(options.format, INTRODUCTION, plan_keys(), plan_schema())
    return 0
