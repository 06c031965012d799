"""`device-agent config`: print the reference of agent.toml."""

from __future__ import annotations

import argparse

from device_agent.config import AgentConfig
from shared.config_reference import add_schema_verb, write_file_reference

INTRODUCTION = """# Reference of agent.toml

The agent reads one TOML file. A key that is not listed here is an error. `required` keys must be set; `absent` keys
have no value unless set. Relative paths are relative to the folder of the file.

`make fix` writes this page. `device-agent config schema` prints the same table, and with `--format json` a JSON Schema
for editors.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_schema_verb(parser, "agent.toml", "device_agent/REFERENCE.md")


def run(options: argparse.Namespace) -> int:
    """Print the reference."""
    return write_file_reference(options.format, INTRODUCTION, AgentConfig, "agent.toml")
