"""`edge-server config`: print the reference of server.toml."""

from __future__ import annotations

import argparse

from edge_server.plan.server_config import ServerConfig
from shared.config_reference import add_schema_verb, write_file_reference

INTRODUCTION = """# Reference of server.toml

The edge server reads one TOML file. A key that is not listed here is an error. `required` keys must be set; `absent`
keys have no value unless set. Relative paths are relative to the folder of the file.

`make fix` writes this page. `edge-server config schema` prints the same table, and with `--format json` a JSON Schema
for editors.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_schema_verb(parser, "server.toml", "edge_server/REFERENCE.md")


def config(options: argparse.Namespace) -> int:
    """Print the reference."""
    return write_file_reference(options.format, INTRODUCTION, ServerConfig, "server.toml")
