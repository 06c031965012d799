"""`device-agent config`: the keys of an agent's file."""

from __future__ import annotations

import argparse

from device_agent.config import AgentConfig
from shared.config_reference import add_format, file_schema, struct_keys, write_reference

INTRODUCTION = """# Reference of agent.toml

The agent reads one TOML file. A key that is not listed here is an error. `required` keys must be set; `absent` keys
have no value unless set. Relative paths are relative to the folder of the file.

`make fix` writes this page. `device-agent config schema` prints the same table, and with `--format json` a JSON Schema
for editors.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    help_ = "print every key of agent.toml with type, unit, default and meaning"
    add_format(verbs.add_parser("schema", help=help_), "device_agent/REFERENCE.md")


def run(options: argparse.Namespace) -> int:
    """Print the reference."""
    schema = file_schema(AgentConfig, "fieldfleet agent.toml")
    write_reference(options.format, INTRODUCTION, struct_keys(AgentConfig), schema)
    return 0
