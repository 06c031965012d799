"""`edge-server config`: the keys of a server's file."""

from __future__ import annotations

import argparse

from edge_server.plan.server_config import ServerConfig
from shared.config_reference import add_format, file_schema, struct_keys, write_reference

INTRODUCTION = """# Reference of server.toml

The edge server reads one TOML file. A key that is not listed here is an error. `required` keys must be set; `absent`
keys have no value unless set. Relative paths are relative to the folder of the file.

`make fix` writes this page. `edge-server config schema` prints the same table, and with `--format json` a JSON Schema
for editors.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    help_ = "print every key of server.toml with type, unit, default and meaning"
    add_format(verbs.add_parser("schema", help=help_), "edge_server/REFERENCE.md")


def config(options: argparse.Namespace) -> int:
    """Print the reference."""
    schema = file_schema(ServerConfig, "fieldfleet server.toml")
    write_reference(options.format, INTRODUCTION, struct_keys(ServerConfig), schema)
    return 0
