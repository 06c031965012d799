"""`device-agent data check`: summarise the training examples and their drift since the last check."""

from __future__ import annotations

import argparse
import subprocess  # noqa: TID251 - for its exception; `data_check` starts our own child
import sys
from pathlib import Path

import msgspec

from device_agent.commands.diagnosis.data_check import COMPLETE, PATIENCE_S, READER, ReadOutcome, run_reader
from device_agent.config import AgentConfig, load
from device_agent.inference.release_projects import export_board_plugins
from shared.data.check_result import (
    LARGE_INPUT_DRIFT,
    LARGE_TARGET_DRIFT,
    DataCheck,
    compare,
    read_check,
    store_check,
)
from shared.errors import ConfigError
from shared.runtime.clock import utc_stamp
from shared.runtime.extras import find_packaged_config
from shared.runtime.interpreter import find_interpreter
from shared.runtime.text_table import write_text

EXIT_DAMAGED = 1
MAX_LISTED = 12


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    help_ = "read the examples; show counts, shapes, damaged files and drift, and report them to the server"
    check = verbs.add_parser("check", help=help_, description=f"{help_[0].upper()}{help_[1:]}.")
    check.add_argument(
        "--config", type=Path, metavar="FILE", help="the agent's TOML file; default: the package's file, if it exists"
    )
    check.add_argument("--format", choices=("table", "json"), default="table", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Check the examples; return 0, 1 if files are damaged; raises ConfigError if the examples cannot be used."""
    path = options.config or find_packaged_config("agent.toml")
    if path is None:
        raise ConfigError("name the agent's file: --config FILE")
    config = load(path)
    check, state_dir = _read(config), Path(config.state_dir)
    before = read_check(state_dir)
    check = msgspec.structs.replace(check, at=utc_stamp(), drift=compare(check, before) if before else None)
    store_check(state_dir, check)
    if options.format == "json":
        sys.stdout.write(msgspec.json.encode(check).decode() + "\n")
    else:
        write_text(sys.stdout, ["\n".join(format_check(check))])
    return EXIT_DAMAGED if check.num_damaged else 0


def _read(config: AgentConfig) -> DataCheck:
    """Read the examples in a child process, whose crash is an error here.

    Raises:
        ConfigError: The examples cannot be used.
    """
    data, limit = config.examples, str(config.trainer.memory_mb << 20)
    interpreter = find_interpreter(config.trainer.python)
    export_board_plugins(config)
    try:
        done = run_reader([READER, limit, COMPLETE], data, interpreter, 10 * PATIENCE_S)
        outcome = msgspec.json.decode(done.stdout, type=ReadOutcome)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{data.path or data.source}: could not be read within {error.timeout:.0f} s") from error
    except msgspec.MsgspecError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"{data.path or data.source}: the process that read it ended with {last[0]}") from error
    if outcome.check is None:
        raise ConfigError(outcome.refusal)
    return outcome.check


def format_check(check: DataCheck) -> list[str]:
    """Format a check as lines."""
    shape = "x".join(map(str, check.shape))
    more = "" if check.is_whole else " or more"
    usage = f"{check.training} to train on, {check.held_out} held out"
    lines = [f"examples   {check.examples}{more}, of shape {shape}; {usage}"]
    lines += [f"classes    {_format_counts(check)}"] if check.classes else []
    for name, quantiles in list(check.quantiles.items())[:MAX_LISTED]:
        numbers = " ".join(f"{value:.4g}" for value in quantiles)
        lines.append(f"target     {name}: minimum, quartiles, maximum {numbers}")
    for key, values in (("mean", check.mean), ("std", check.std)):
        more = " …" if len(values) > MAX_LISTED else ""
        lines.append(f"{key:<10} {' '.join(f'{value:.4g}' for value in values[:MAX_LISTED])}{more}")
    lines.append(f"damaged    {check.num_damaged} files")
    lines += [f"           {message}" for message in check.damaged]
    lines += [f"note       {note}" for note in check.notes]
    return [*lines, *_format_drift(check)]


def _format_counts(check: DataCheck) -> str:
    counts = [f"{name}: {count}" for name, count in list(check.classes.items())[:MAX_LISTED]]
    more = f" and {len(check.classes) - MAX_LISTED} more" if len(check.classes) > MAX_LISTED else ""
    return ", ".join(counts) + more


def _format_drift(check: DataCheck) -> list[str]:
    drift = check.drift
    if drift is None:
        return ["drift      none yet: this is the first check"]
    targets = "" if drift.targets is None else f", targets {drift.targets:.3f}"
    lines = [f"drift      inputs {drift.inputs:.3f} std{targets}, {drift.examples:+d} examples since {drift.since}"]
    if drift.inputs > LARGE_INPUT_DRIFT or (drift.targets or 0.0) > LARGE_TARGET_DRIFT:
        lines.append("warning    the examples differ from those of the last check; look at the sensor or camera")
    return lines
