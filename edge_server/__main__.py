"""Command line of the gateway."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_server import commands
from edge_server.commands import EXIT_INTERRUPTED, EXIT_SHORT
from shared.errors import ConfigError, FieldFleetError

EXIT_CONFIG = 2

Command = Callable[[argparse.Namespace], int]

COMMANDS: Mapping[str, Command] = {
    "run": commands.run,
    "runs": commands.runs,
    "show": commands.show,
    "replay": commands.replay,
    "trial": commands.trial,
    "chaos": commands.chaos,
}


def main() -> None:
    """Parse the command line and run; exit code 2 means that the operator must edit something."""
    options = _parser().parse_args()
    try:
        code = COMMANDS[options.command](options)
    except ConfigError as error:
        sys.stderr.write(f"edge-server: {error}\n")
        code = EXIT_CONFIG
    except FieldFleetError as error:
        sys.stderr.write(f"edge-server: {error}\n")
        code = EXIT_SHORT
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("edge-server: interrupted; everything it started has ended\n")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_SHORT
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edge-server",
        description="The server of one site: rounds, records, replay.",
        epilog="Exit codes: 0 done, 1 ended short of its plan, 2 something to edit, 130 interrupted.",
    )
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = verbs.add_parser("run", help="run a plan with the devices of the site, or go on with an interrupted run")
    run.add_argument("--config", type=Path, required=True, metavar="FILE")
    _where(verbs.add_parser("runs", help="list runs"))
    show = verbs.add_parser("show", help="show the rounds of a run")
    show.add_argument("run", metavar="RUN", help="name of a run, or path of its folder")
    _where(show)
    replay = verbs.add_parser("replay", help="run a plan on this machine in virtual time")
    replay.add_argument("plan", type=Path, metavar="PLAN")
    replay.add_argument("--devices", type=int, default=0, metavar="N", help="instead of those that the plan names")
    _where(replay)
    trial = verbs.add_parser("trial", help="field trials").add_subparsers(dest="verb", required=True, metavar="VERB")
    trial_run = trial.add_parser("run", help="run a plan live, with its own broker and agents on this machine")
    trial_run.add_argument("plan", type=Path, metavar="PLAN")
    trial_run.add_argument("--local", type=int, default=0, metavar="N", help="agents; default: those the plan names")
    trial_run.add_argument("--embedded-broker", action="store_true", help="even where mosquitto is installed")
    _where(trial_run)
    chaos = verbs.add_parser("chaos", help="run a plan live on this machine and kill its processes at random")
    chaos.add_argument("plan", type=Path, metavar="PLAN")
    chaos.add_argument("--kills", type=int, required=True, metavar="N", help="how many; the plan is run until then")
    chaos.add_argument("--seed", type=int, default=0, metavar="S", help="of what is killed when")
    chaos.add_argument("--local", type=int, default=0, metavar="N", help="agents; default: those the plan names")
    chaos.add_argument("--embedded-broker", action="store_true", help="even where mosquitto is installed")
    _where(chaos)
    return parser


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs")
    root = os.environ.get("FIELDFLEET_DATA", "../shared/data")
    parser.add_argument("--data-root", type=Path, default=Path(root), metavar="DIR", help="folder of data sets")
    parser.add_argument("--format", choices=("table", "json"), default="table")


if __name__ == "__main__":
    main()
