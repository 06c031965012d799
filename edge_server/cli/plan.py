"""`edge-server plan schema`: the reference of a plan's keys, as tables, as a page or as a JSON Schema."""

from __future__ import annotations

import argparse
import sys

import msgspec

from shared.runtime.text_table import TextColumn, TextTable, write_text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    schema = verbs.add_parser("schema", help="print every key of a plan with type, unit, default and meaning")
    help_ = "json: a JSON Schema for editors; markdown: the page edge_server/plan/REFERENCE.md; default: %(default)s"
    schema.add_argument("--format", choices=("table", "markdown", "json"), default="table", help=help_)


def plan(options: argparse.Namespace) -> int:
    """Print the reference; return the exit code."""
    from edge_server.cli.plan_reference import as_markdown, plan_keys  # noqa: PLC0415
    from edge_server.cli.plan_schema import plan_schema  # noqa: PLC0415 - torch, for the builders' options

    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan_schema()), indent=1).decode() + "\n")
        return 0
    if options.format == "markdown":
        sys.stdout.write(as_markdown(plan_keys()))
        return 0
    columns = [TextColumn("key"), TextColumn("type", least=16), TextColumn("unit"), TextColumn("default", least=12)]
    for group in plan_keys():
        about = [group.meaning] if group.meaning else []
        table = TextTable([*columns, TextColumn("meaning", least=24)], group.keys)
        write_text(sys.stdout, group.heading, *about, *([table] if group.keys else ["no options"]), "")
    return 0
