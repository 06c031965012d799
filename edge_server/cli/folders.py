"""Options for the folders of runs and data sets: `--data-dir`, `--data-root`, `--config`."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_server.plan.data_folder import DATA_DIR, check_data_folder, default_data_root
from shared.runtime.extras import find_readable_config

RUN_HELP = "name of a run or a unique prefix of it, `last`, or the path of its folder"
RUN_OR_SITES_HELP = (
    f"{RUN_HELP}; for a multi-site run also the common name prefix of its runs, or a folder that has only these runs"
)
EMBEDDED_HELP = "use the built-in broker, written in Python, even if mosquitto is installed"
DATA_ROOT_HELP = "folder of data sets; default: $FIELDFLEET_DATA, else ../shared/data, relative to the current folder"
RUN_CREATORS = frozenset({"replay", "trial", "chaos", "study", "flower-app"})
"""Commands that create runs: they use a Debian package's server.toml only if it is named."""


def add_options(
    parser: argparse.ArgumentParser, *, data: bool = False, form: bool = False, config: bool = True, again: bool = False
) -> None:
    """Declare the options for the folders.

    Args:
        data: The command reads data sets too.
        form: The command prints a table or JSON.
        config: A server's file may set the folders; false where `--config` has another meaning.
        again: The parser is that of a subcommand, whose parent has these options too; values given there hold.
    """
    usual = argparse.SUPPRESS if again else None
    parser.add_argument(
        "--data-dir", type=Path, default=usual, metavar="DIR", help=f"folder of runs; default: {DATA_DIR}"
    )
    if data:
        help_ = DATA_ROOT_HELP
        parser.add_argument("--data-root", type=Path, default=usual, metavar="DIR", help=help_)
    if config:
        help_ = (
            "server.toml; its folders apply unless an option replaces them; default: the Debian package's file, if any"
        )
        parser.add_argument("--config", type=Path, default=usual, metavar="FILE", help=help_)
    if form:
        parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")


def resolve(options: argparse.Namespace) -> None:
    """Fill in the folders that were not given; refuse one that needs a newer version.

    Raises:
        ConfigError: The server's file is invalid, or a newer version wrote in the folder of runs.
    """
    _fill_defaults(options)
    if hasattr(options, "data_root"):
        options.data_root = options.data_root.resolve()  # started processes have other working folders
    if hasattr(options, "data_dir"):
        check_data_folder(options.data_dir)


def _fill_defaults(options: argparse.Namespace) -> None:
    missing = [name for name in ("data_dir", "data_root") if getattr(options, name, "") is None]
    if not missing:
        return
    if "data_dir" in missing and getattr(options, "config", "") is None and options.command not in RUN_CREATORS:
        options.config = find_readable_config("server.toml")
    defaults = {"data_dir": DATA_DIR, "data_root": default_data_root()}
    if options.config:
        from edge_server.plan.server_config import load  # noqa: PLC0415

        config = load(options.config)
        defaults = {"data_dir": Path(config.data_dir), "data_root": Path(config.data_root)}
    for name in missing:
        setattr(options, name, defaults[name])
