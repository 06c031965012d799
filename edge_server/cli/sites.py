"""`edge-server sites`: show a site's rounds and its exchange with peer sites."""

from __future__ import annotations

import argparse
import sys

import msgspec

from edge_server.cli import folders
from edge_server.cli.terminal import write_text
from edge_server.journal.runs import find_run
from edge_server.sites.overview import read_rounds, sites_table, summarise_sites


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help=f"{folders.RUN_HELP}; default: last")
    folders.add_options(parser, form=True)


def sites(options: argparse.Namespace) -> int:
    """Show a site's rounds and its exchange with its peers.

    Raises:
        ConfigError: There is no such run, or it has a single site.
    """
    run = find_run(options.data_dir, options.run)
    summary = summarise_sites(run.records, read_rounds(run.folder))
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n")
        return 0
    table, lines = sites_table(summary)
    write_text(sys.stdout, [table, *lines])
    return 0
