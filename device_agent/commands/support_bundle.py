"""`device-agent support-bundle`: collect diagnostics for support in one file, without secrets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from device_agent.commands.diagnosis.identity import secret_files
from device_agent.commands.doctor import run_checks
from device_agent.config import load
from shared.errors import ConfigError
from shared.runtime import backports
from shared.runtime.clock import utc_stamp
from shared.runtime.diagnosis.bundle import (
    last_lines,
    list_files,
    read_journal,
    read_secret_lines,
    running_versions,
    write_bundle,
)
from shared.runtime.extras import find_packaged_config

UNIT = "fieldfleet-agent"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Write one tar.gz with versions, settings, doctor findings, a list of files and the end of the log, without "
        "keys, passwords, tokens, addresses and serial numbers. Review it before you send it."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the agent's TOML file")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="output file; default: agent-bundle-TIME.tar.gz in this folder"
    )
    help_ = "log file whose end is included; default: the service's journal"
    parser.add_argument("--log", type=Path, metavar="FILE", help=help_)


def run(options: argparse.Namespace) -> int:
    """Write the bundle; print its path."""
    config_path = options.config or find_packaged_config("agent.toml")
    path = options.out or Path(f"agent-bundle-{utc_stamp()}.tar.gz")
    log = last_lines(options.log) if options.log else backports.run(read_journal(UNIT))
    files: dict[str, object] = {"versions.json": running_versions(), "log.txt": log}
    secrets = set[str]()
    if config_path:
        try:
            config = load(config_path)
        except ConfigError as error:
            files["config.txt"] = f"{error}\n"
        else:
            files |= {"config.json": config, "state.txt": list_files(Path(config.state_dir))}
            secrets = read_secret_lines(secret_files(config.broker))
    files["doctor.json"] = list(run_checks(config_path, None))
    write_bundle(path, files, secrets)
    sys.stdout.write(f"{path}\n")
    return 0
