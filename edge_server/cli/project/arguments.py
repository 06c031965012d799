"""Arguments and entry functions of `edge-server new` and `edge-server project`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from edge_server.cli.gateway.site import add_folder, open_site
from edge_server.cli.terminal import write_text
from shared.runtime.command_line import add_command
from shared.runtime.text_table import TextColumn, TextTable

KINDS = ("classification", "regression", "multilabel", "forecast", "segmentation", "anomaly", "custom")


def new_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server new`."""
    help_ = "name of the project, its folder and its package: lower-case letters, digits, underscores"
    parser.add_argument("name", metavar="NAME", help=help_)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="kind of task; default: %(default)s")


def project_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server project`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    build = add_command(verbs, "build", "build the wheel and manifest of a project into its folder dist")
    publish = add_command(verbs, "publish", "sign a project and offer it to the boards of a site that list it")
    for verb in (build, publish):
        help_ = "working folder of the project; default: the current folder"
        verb.add_argument("project", nargs="?", type=Path, default=Path(), metavar="PROJECT", help=help_)
    listing = add_command(verbs, "list", "list the published projects of a site")
    listing.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    remove = add_command(verbs, "remove", "withdraw a version of a project; boards that have it keep it")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("version", metavar="VERSION")
    for verb in (publish, listing, remove):
        add_folder(verb)


def new(options: argparse.Namespace) -> int:
    """Write a working folder.

    Raises:
        ConfigError: The name is not suitable, or the folder exists.
    """
    from edge_server.cli.project.new import write_project  # noqa: PLC0415

    folder = write_project(Path(), options.name, options.kind)
    write_text(
        sys.stdout,
        f"{folder} written: a network, a data source, a plan and a test. Next:\n"
        f"  cd {folder}\n"
        "  edge-server replay plan.toml       # in virtual time\n"
        "  edge-server trial run plan.toml    # live, with three agents on this machine",
    )
    return 0


def project(options: argparse.Namespace) -> int:
    """Build, publish, list or remove projects; return the exit code.

    Raises:
        ConfigError: There is no such folder, site or version, or a file does not belong into a project.
    """
    deeds = {"build": _build_wheel, "publish": _publish, "list": _list, "remove": _remove}
    return deeds[options.verb](options)


def _build_wheel(options: argparse.Namespace) -> int:
    from edge_server.cli.project.build import build_project, write_build  # noqa: PLC0415

    built = build_project(options.project)
    path = write_build(built, options.project)
    write_text(sys.stdout, f"{path}, {len(built.wheel)} bytes, digest {built.manifest.digest[:12]}")
    return 0


def _publish(options: argparse.Namespace) -> int:
    from edge_server.cli.project.build import build_project  # noqa: PLC0415
    from edge_server.gateway.packages.projects import publish_project  # noqa: PLC0415

    built = build_project(options.project)
    manifest = publish_project(open_site(options), built.manifest, built.wheel)
    write_text(
        sys.stdout,
        f"{manifest.name} {manifest.version} is signed by site {manifest.site}; boards with "
        f'[trainer] projects = ["{manifest.name}"] install it with their next task',
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    from edge_server.gateway.packages.store import read_index  # noqa: PLC0415
    from edge_server.gateway.state import read_state  # noqa: PLC0415

    read_state(options.folder)
    manifests = read_index(options.folder).project_manifests()
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(manifests), indent=1).decode() + "\n")
        return 0
    if not manifests:
        write_text(sys.stdout, "no projects; publish one by `edge-server project publish`")
        return 0
    headings = [TextColumn(heading) for heading in ("project", "version", "signed", "digest", "requires")]
    rows = [
        (manifest.name, manifest.version, manifest.created, manifest.digest[:12], ", ".join(manifest.requires) or "-")
        for manifest in manifests
    ]
    write_text(sys.stdout, TextTable(headings, rows))
    return 0


def _remove(options: argparse.Namespace) -> int:
    from edge_server.gateway.packages.projects import remove_project  # noqa: PLC0415

    removed = remove_project(open_site(options), options.name, options.version)
    write_text(sys.stdout, f"{removed.name} {removed.version} is withdrawn; boards that have it keep it")
    return 0
