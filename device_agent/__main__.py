"""Command line of the device agent."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Container, Mapping
from types import ModuleType

from shared.errors import ConfigError, FieldFleetError, Unwritable
from shared.runtime.command_line import add_command, add_general_options, missing_extra, parse_all, run_command

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130

COMMANDS: Mapping[str, str] = {
    "run": "connect to the site's broker and serve tasks until stopped",
    "join": "join a site with a one-time token",
    "probe": "show the measurements of this board",
    "doctor": "find what keeps this board from measuring and training; suggest fixes",
    "data": "check the training examples: counts, damaged files, drift since the last check",
    "support-bundle": "write a diagnostic file for support, without secrets",
    "setup": "install PyTorch or ONNX Runtime for the packaged agent",
    "upgrade": "install an agent version signed by the site; roll back if it fails",
    "calibrate": "fit this board's power model with real training; takes about four minutes",
    "bench-inference": "measure latency, throughput and energy of a served model",
    "config": "print the reference of all keys of agent.toml",
    "profile": "show this board's firmware profile; preview or apply clocks and power mode",
}
"""Summary of each command; its module in `device_agent.commands` is imported on demand."""


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"device_agent.commands.{command.replace('-', '_')}")


def main() -> None:
    """Parse the command line and run; exit code 2 asks the operator to correct the configuration."""
    sys.exit(run_command("device-agent", _main, EXIT_FAILED))


def _main() -> int:
    try:
        code = _run(sys.argv[1:])
    except (ConfigError, Unwritable) as error:
        sys.stderr.write(f"device-agent: {error}\n")
        code = EXIT_CONFIG
    except FieldFleetError as error:
        sys.stderr.write(f"device-agent: {error}\n")
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if not (remedy := missing_extra(error.name, "device")):
            raise
        sys.stderr.write(f"device-agent: {remedy}\n")
        code = EXIT_CONFIG
    return code


def build_parser(loaded: Container[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of those in `loaded`, whose modules it imports."""
    parser = argparse.ArgumentParser(
        prog="device-agent",
        description="Device agent of a fieldfleet site: measures one board, trains and serves models on it.",
        epilog="Exit codes: 0 success, 1 failure or failed check, 2 configuration error, 130 interrupted.",
    )
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        verb = add_command(verbs, name, summary)
        if name in loaded:
            _module(name).add(verb)
    add_general_options(parser)
    return parser


def _run(arguments: list[str]) -> int:
    requested = [argument for argument in arguments if argument in COMMANDS][:1]  # import only the requested command
    options = parse_all(build_parser(requested), arguments)
    code: int = _module(options.command).run(options)
    return code


if __name__ == "__main__":
    main()
