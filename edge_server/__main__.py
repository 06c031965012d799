"""Command-line entry point of `edge-server`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_server.cli import commands, folders
from edge_server.cli import config as config_command
from edge_server.cli import flower_app as flower_app_command
from edge_server.cli import plugins as plugins_command
from edge_server.cli import queue as queue_command
from edge_server.cli import report as report_command
from edge_server.cli import runs as runs_command
from edge_server.cli import sites as sites_command
from edge_server.cli import study as study_command
from edge_server.cli import trace as trace_command
from edge_server.cli.commands import EXIT_INCOMPLETE, EXIT_INTERRUPTED
from edge_server.cli.gateway import arguments as gateway_commands
from edge_server.cli.gateway import packages as packages_command
from edge_server.cli.gateway import site as site_command
from edge_server.cli.project import arguments as project_command
from edge_server.cli.releases import release as release_command
from edge_server.cli.releases import rollout as rollout_command
from shared import registry
from shared.errors import ConfigError, FieldFleetError, SiteBusy
from shared.projects.working_folder import activate_found
from shared.runtime.command_line import (
    add_command,
    add_config,
    add_general_options,
    missing_extra,
    parse_all,
    run_command,
)
from shared.runtime.processes import keep_private
from shared.runtime.support.command import add_arguments as add_setup_arguments

EXIT_CONFIG = 2
EXIT_BUSY = 3
PLAN_HELP = "plan file"

Command = Callable[[argparse.Namespace], int]

COMMANDS: Mapping[str, Command] = {
    "run": commands.run,
    "submit": queue_command.submit,
    "queue": queue_command.queue,
    "runs": runs_command.runs,
    "sites": sites_command.sites,
    "show": commands.show,
    "explain": commands.explain,
    "replay": commands.replay,
    "devices": commands.devices,
    "models": commands.models,
    "plugins": plugins_command.plugins,
    "new": project_command.new,
    "project": project_command.project,
    "trial": commands.trial,
    "flower-app": commands.flower_app,
    "chaos": commands.chaos,
    "plan": commands.plan,
    "config": config_command.config,
    "study": study_command.study,
    "report": report_command.report,
    "export": release_command.export,
    "release": release_command.release,
    "serve-tops": release_command.serve_tops,
    "rollout": commands.rollout,
    "trace": trace_command.trace,
    "site": site_command.site,
    "revoke": site_command.revoke,
    "enrol": gateway_commands.enrol,
    "enrolment-service": gateway_commands.enrolment_service,
    "packages": packages_command.packages,
    "doctor": gateway_commands.doctor,
    "support-bundle": gateway_commands.support_bundle,
    "setup": commands.setup,
}

RUN_WRITERS = frozenset(
    {
        "run",
        "trial",
        "replay",
        "flower-app",
        "submit",
        "queue",
        "chaos",
        "study",
        "release",
        "rollout",
        "serve-tops",
        "enrol",
        "enrolment-service",
    }
)
"""Commands that write runs, readable by their user only; pages, tables and traces may be read by others."""


def main() -> None:
    """Parse the command line and run the command; exit code 2 means that the operator must edit something."""
    sys.exit(run_command("edge-server", _run, EXIT_INCOMPLETE))


def _run() -> int:
    options = parse_all(build_parser())
    if options.command in RUN_WRITERS:
        keep_private()
    try:
        registry.allow(registry.entries_of_environment())
        activate_found(Path())
        folders.resolve(options)
        code = COMMANDS[options.command](options)
    except ConfigError as error:
        sys.stderr.write(f"edge-server: {error}\n")
        code = EXIT_CONFIG
    except FieldFleetError as error:
        sys.stderr.write(f"edge-server: {error}\n")
        code = EXIT_BUSY if isinstance(error, SiteBusy) else EXIT_INCOMPLETE
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("edge-server: interrupted\n")
        code = EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if not (remedy := missing_extra(error.name, "server")):
            raise
        sys.stderr.write(f"edge-server: {remedy}\n")
        code = EXIT_CONFIG
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="edge-server",
        description="The server of one site: run plans with its devices, record and replay runs.",
        epilog="Exit codes: 0 success, 1 failure or incomplete, 2 error in command, plan or file, "
        "3 another server is running for the site, 130 interrupted.",
    )
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _run_service(verbs)
    runs_command.arguments(add_command(verbs, "runs", "list runs; with a VERB: remove runs"))
    sites_command.arguments(
        add_command(
            verbs,
            "sites",
            "show a site's part in a multi-site run: rounds, bytes, coordinator",
        )
    )
    show = add_command(verbs, "show", "show the rounds of a run")
    show.add_argument("run", metavar="RUN", help=folders.RUN_HELP)
    show.add_argument("--devices", action="store_true", help="show a column for each device, even if there are many")
    folders.add_options(show, form=True)
    _explain(add_command(verbs, "explain", "explain the decisions for each device in a round"))
    _devices(add_command(verbs, "devices", "show the devices of a site and their latest measurements"))
    _models(add_command(verbs, "models", "list the models, or show where one can be split"))
    project_command.new_arguments(add_command(verbs, "new", "write the folder of a new project: plan, network, data"))
    project_command.project_arguments(
        add_command(verbs, "project", "build a project, or publish it to the boards of a site")
    )
    plugins_command.arguments(add_command(verbs, "plugins", "list plugins with version and digest"))
    _replay(add_command(verbs, "replay", "run a plan, or replay a recorded run, on this machine in virtual time"))
    trial = add_command(
        verbs, "trial", "try out a plan file once, with local agents or connected devices"
    ).add_subparsers(dest="verb", required=True, metavar="VERB")
    _trial_run(add_command(trial, "run", "run a plan file once, with local agents or connected devices"))
    commands.plan_arguments(add_command(verbs, "plan", "check a plan, or print the reference of plan keys"))
    config_command.arguments(add_command(verbs, "config", "print the reference of all keys of server.toml"))
    _chaos(add_command(verbs, "chaos", "run a plan live on this machine while killing its processes at random"))
    flower_app = add_command(verbs, "flower-app", "run an existing Flower app, with agents in place of its nodes")
    flower_app_command.arguments(flower_app)
    _results(verbs)
    _gateway(verbs)
    add_general_options(parser)
    return parser


def _results(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands that study and compare runs, and release and roll out their models."""
    study = add_command(verbs, "study", "run a grid of plans in virtual time, in parallel, and compare them")
    study_command.arguments(study)
    folders.add_options(study, data=True, form=True)
    report = add_command(verbs, "report", "compare runs in one page, CSV or JSON file")
    report_command.arguments(report)
    folders.add_options(report)
    export = add_command(verbs, "export", "write a run's model as one file: ONNX, safetensors or TorchScript")
    release_command.export_arguments(export)
    releases = add_command(verbs, "release", "create, list, show, export or delete releases of trained models")
    release_command.release_arguments(releases)
    tops = add_command(verbs, "serve-tops", "run the upper layers of split models for devices that run the lower ones")
    add_config(tops, "server.toml", "the server's configuration file; see [tops]")
    rollouts = add_command(verbs, "rollout", "roll out a release to the boards of a site in waves")
    rollout_command.arguments(rollouts)
    trace_command.arguments(add_command(verbs, "trace", "export, import or check portable traces of runs"))


def _run_service(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands of a site's server and its queue."""
    run = add_command(verbs, "run", "run a site's plan and its queued plans; resume interrupted runs")
    add_config(run, "server.toml", "the server's configuration file, see edge_server/REFERENCE.md")
    run.add_argument(
        "--again",
        action="store_true",
        help="start another run; by default `run` does nothing if the plan's last run has ended",
    )
    run.add_argument("--wait", action="store_true", help="wait for further jobs when the queue is empty, see `submit`")
    queue_command.submit_arguments(add_command(verbs, "submit", "add a plan to the queue of a site's server"))
    queue_command.queue_arguments(add_command(verbs, "queue", "list the queue of a site; with a VERB: change it"))


def _gateway(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands of a gateway."""
    site_command.arguments(add_command(verbs, "site", "manage the gateway of a site: CAs, broker and files"))
    site_command.revoke_arguments(
        add_command(
            verbs, "revoke", "revoke a device's certificates at once; only `enrol --readmit` admits the device again"
        )
    )
    gateway_commands.add_commands(verbs)
    add_setup_arguments(add_command(verbs, "setup", "install PyTorch and CVXPY for the Debian package"))


def _chaos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("--kills", type=int, required=True, metavar="N", help="number of kills during the plan")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the kills")
    parser.add_argument(
        "--local", type=int, default=0, metavar="N", help="number of agents; default: one for each device of the plan"
    )
    parser.add_argument("--embedded-broker", action="store_true", help=folders.EMBEDDED_HELP)
    folders.add_options(parser, data=True, form=True)


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=folders.RUN_HELP)
    help_ = "round number, from 1; for a plan with sites also G.E: edge round E of global round G, both from 0"
    parser.add_argument("round", metavar="ROUND", help=help_)
    parser.add_argument("--device", default="", metavar="NAME", help="show only this device")
    folders.add_options(parser, form=True)


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan",
        type=Path,
        metavar="PLAN|TRACE|RUN",
        help=f"plan file, trace folder, or run: {folders.RUN_HELP}",
    )
    parser.add_argument(
        "instead",
        type=Path,
        nargs="?",
        metavar="PLAN",
        help="with TRACE: run this plan, instead of the recorded one, on the trace's devices",
    )
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="number of devices, instead of the plan's")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="training processes; default: all cores")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="do not train several devices in one pass; slower, bit-identical to a live run",
    )
    help_ = "replay a recorded run even if the data sets on this machine differ from those that its devices used"
    parser.add_argument("--other-data", action="store_true", help=help_)
    help_ = "for a recorded run whose devices used their own data: train on this data set, such as npz=FILE"
    parser.add_argument("--data", default="", metavar="SOURCE=PATH", help=help_)
    help_ = (
        "for a recorded run: train on random inputs of SHAPE, such as 1x28x28 (default: the recorded shape); "
        "decisions, times, bytes and joules are those of the record, the accuracy is meaningless"
    )
    parser.add_argument("--synthetic", nargs="?", const="", metavar="SHAPE", help=help_)
    parser.add_argument(
        "--compare", metavar="RUN", help=f"report the differences from this run: {folders.RUN_OR_SITES_HELP}"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="with --compare: also write an HTML page")
    parser.add_argument(
        "--fail-above",
        type=float,
        metavar="X",
        help="with --compare: exit with 1 if the median error of a round's seconds is above X, such as 0.1 for 10 %%",
    )
    folders.add_options(parser, data=True, form=True)


def _trial_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help=PLAN_HELP)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="use the devices of the site of this server.toml")
    where.add_argument(
        "--local",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="start a broker and N agents on this machine; without N, one agent for each device of the plan",
    )
    parser.add_argument("--embedded-broker", action="store_true", help=f"with --local: {folders.EMBEDDED_HELP}")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "auto"),
        help="with --local: processor of server and agents; default: cpu, bit-identical to a replay",
    )
    help_ = "with --local: name of the run; the name of an interrupted trial of this plan resumes it"
    parser.add_argument("--run", default="", metavar="NAME", help=help_)
    help_ = (
        "for optimizer hcef on this machine: run the baseline optimizer cef first, then hcef with SHARE (such as 0.6) "
        "of the seconds and joules of cef as [budget]"
    )
    parser.add_argument("--cef-share", type=float, metavar="SHARE", help=help_)
    folders.add_options(parser, data=True, form=True, config=False)


def _devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device", nargs="?", default="", metavar="DEVICE|approve|forget", help="show all readings of this device"
    )
    gateway_commands.device_verb_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, metavar="FILE", help="ask the broker of this server.toml")
    source.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="read the server's history in this folder; default: runs"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="refresh every SECONDS seconds")
    parser.add_argument("--plot", default="", metavar="READING", help="plot this reading of DEVICE")
    parser.add_argument("--hours", type=float, default=24.0, metavar="N", help="hours to plot; default: 24")


def _models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="", metavar="NAME", help="show the layers at which this model can be split"
    )
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of NAME, repeatable")
    parser.add_argument("--example", type=int, nargs="+", default=[], metavar="N", help="shape of one input of NAME")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="batch size; default: 64")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")


if __name__ == "__main__":
    main()
