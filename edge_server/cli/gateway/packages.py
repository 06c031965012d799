"""`edge-server packages`: what this gateway offers to its boards: versions of the agent, and wheels for their setup."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli.gateway.package_import import format_builds, import_packages, import_wheels
from edge_server.cli.gateway.site import add_folder, open_site
from shared.runtime.text_table import TextColumn, TextTable, write_text

if TYPE_CHECKING:
    from edge_server.gateway.packages.store import PackageIndex


def packages_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs of `edge-server packages`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="take packages of the agent in, sign them, and offer them to boards")
    add.add_argument("files", nargs="+", type=Path, metavar="FILE.deb", help="as `make deb` builds them")
    wheels = verbs.add_parser(
        "add-wheels", help="take in what boards set themselves up with, so that they need no internet"
    )
    help_ = "with the files that `device-agent setup train --list` names, for all kinds of boards"
    wheels.add_argument("wheels", type=Path, metavar="FOLDER", help=help_)
    listing = verbs.add_parser("list", help="show what boards are offered")
    listing.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    remove = verbs.add_parser("remove", help="offer a version no more; boards that run it keep it")
    remove.add_argument("version", metavar="VERSION", help="such as 0.4.0")
    for parser_of_verb in verbs.choices.values():
        add_folder(parser_of_verb)


def packages(options: argparse.Namespace) -> int:
    """Do what a verb of `packages` says; return the exit code.

    Raises:
        ConfigError: There is no such site, a file is no package of the agent, or there is no such version.
    """
    deeds = {"add": _add, "add-wheels": _add_wheels, "list": _list, "remove": _remove}
    return deeds[options.verb](options)


def _add(options: argparse.Namespace) -> int:
    from edge_server.gateway.packages.store import read_debs  # noqa: PLC0415

    import_packages(open_site(options), read_debs(options.files))
    return 0


def _add_wheels(options: argparse.Namespace) -> int:
    import_wheels(open_site(options), options.wheels)
    return 0


def _list(options: argparse.Namespace) -> int:
    from edge_server.gateway.packages.store import read_index  # noqa: PLC0415
    from edge_server.gateway.state import read_state  # noqa: PLC0415

    read_state(options.folder)
    index = read_index(options.folder)
    if options.format == "json":
        content = {"releases": index.manifests(), "wheels": index.wheels}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n")
        return 0
    _show(index)
    return 0


def _show(index: PackageIndex) -> None:
    if not index.releases:
        write_text(sys.stdout, "no packages; `edge-server packages add FILE.deb` takes them in")
    else:
        headings = (
            TextColumn("version"),
            TextColumn("no.", right=True),
            TextColumn("for", least=20),
            TextColumn("signed"),
        )
        rows = [
            (manifest.version, str(manifest.serial), format_builds(manifest), manifest.created)
            for manifest in index.manifests()
        ]
        write_text(sys.stdout, TextTable(headings, rows))
    if index.wheels:
        size = sum(wheel.size for wheel in index.wheels)
        write_text(sys.stdout, f"{len(index.wheels)} wheels for `device-agent setup`, {size / 1e6:.0f} MB")


def _remove(options: argparse.Namespace) -> int:
    from edge_server.gateway.packages.store import remove_packages  # noqa: PLC0415

    removed = remove_packages(open_site(options), options.version)
    write_text(sys.stdout, f"{removed.name} {removed.version} is offered no more; boards that run it keep it")
    return 0
