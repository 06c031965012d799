"""Where a command finds runs and data sets: `--data-dir`, `--data-root`, or the file of a server, `--config`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from edge_server.plan.data_folder import check_data_folder
from shared.runtime.extras import readable_packaged_config

RUN_HELP = "name of a run or what only its name begins with, `last`, or the path of its folder"
RUN_OR_SITES_HELP = f"{RUN_HELP}; of several sites what all their runs' names begin with, or a folder with these alone"
DATA_DIR = Path("runs")
RUN_CREATORS = frozenset({"replay", "trial", "chaos", "study"})
"""Commands that make runs of their own: they go by a Debian package's server.toml only where it is named."""


def default_data_root() -> Path:
    """Return the folder of data sets where none is named."""
    return Path(os.environ.get("FIELDFLEET_DATA", "../shared/data"))


def add_options(
    parser: argparse.ArgumentParser, *, data: bool = False, form: bool = False, config: bool = True, again: bool = False
) -> None:
    """Declare the options that name the folders.

    Args:
        data: Whether it reads data sets too.
        form: Whether it prints a table, or JSON for scripts.
        config: Whether a server's file may name the folders; not where it has a meaning of its own.
        again: Whether the command that this one is a verb of has them too: what was named there holds.
    """
    usual = argparse.SUPPRESS if again else None
    parser.add_argument(
        "--data-dir", type=Path, default=usual, metavar="DIR", help=f"folder of runs; default: {DATA_DIR}"
    )
    if data:
        help_ = f"folder of data sets; default: {default_data_root()}, see FIELDFLEET_DATA"
        parser.add_argument("--data-root", type=Path, default=usual, metavar="DIR", help=help_)
    if config:
        help_ = "a server's file: its folders, where they are not named here; default: a package's own"
        parser.add_argument("--config", type=Path, default=usual, metavar="FILE", help=help_)
    if form:
        parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")


def resolve(options: argparse.Namespace) -> None:
    """Put a folder in the place of every one that was not named; refuse one that a newer version alone can read.

    Raises:
        ConfigError: The server's file cannot be used, or a newer version wrote in the folder of runs.
    """
    _fill_defaults(options)
    if hasattr(options, "data_root"):
        options.data_root = options.data_root.resolve()  # processes that a command starts work in other folders
    if hasattr(options, "data_dir"):
        check_data_folder(options.data_dir)


def _fill_defaults(options: argparse.Namespace) -> None:
    missing = [name for name in ("data_dir", "data_root") if getattr(options, name, "") is None]
    if not missing:
        return
    if "data_dir" in missing and getattr(options, "config", "") is None and options.command not in RUN_CREATORS:
        options.config = readable_packaged_config("server.toml")
    defaults = {"data_dir": DATA_DIR, "data_root": default_data_root()}
    if options.config:
        from edge_server.plan.server_config import load  # noqa: PLC0415

        config = load(options.config)
        defaults = {"data_dir": Path(config.data_dir), "data_root": Path(config.data_root)}
    for name in missing:
        setattr(options, name, defaults[name])
