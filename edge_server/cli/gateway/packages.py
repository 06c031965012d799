"""`edge-server packages`: manage the agent versions and wheels offered to boards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli.gateway.package_import import format_builds, import_packages, import_wheels
from edge_server.cli.gateway.site import add_folder, open_site
from edge_server.cli.terminal import write_text
from shared.runtime.command_line import add_command
from shared.runtime.text_table import TextColumn, TextTable

if TYPE_CHECKING:
    from edge_server.gateway.packages.store import PackageIndex


def packages_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server packages`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = add_command(verbs, "add", "add and sign packages of the agent for boards")
    add.add_argument("files", nargs="+", type=Path, metavar="FILE.deb", help="package built by `make deb`")
    wheels = add_command(
        verbs, "add-wheels", "add wheels of PyTorch and ONNX Runtime, so that boards install these without internet"
    )
    help_ = "folder with the files that `device-agent setup train --list` prints on each kind of board"
    wheels.add_argument("wheels", type=Path, metavar="FOLDER", help=help_)
    listing = add_command(verbs, "list", "list the packages and wheels for boards")
    listing.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    remove = add_command(verbs, "remove", "remove a version of the agent; boards that run this version keep it")
    remove.add_argument("version", metavar="VERSION", help="version, such as 0.4.0")
    for parser_of_verb in verbs.choices.values():
        add_folder(parser_of_verb)


def packages(options: argparse.Namespace) -> int:
    """Add, list or remove packages; return the exit code.

    Raises:
        ConfigError: There is no such site, a file is not a package of the agent, or there is no such version.
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
        write_text(sys.stdout, "no packages; add them by `edge-server packages add FILE.deb`")
    else:
        headings = (
            TextColumn("version"),
            TextColumn("serial", right=True),
            TextColumn("platforms", least=20),
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
    write_text(sys.stdout, f"{removed.name} {removed.version} removed; boards that run it keep it")
    return 0
