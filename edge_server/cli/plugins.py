"""`edge-server plugins`: list the plugins that are installed or listed on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edge_server.cli.terminal import write_text
from edge_server.plan.server_config import load, plugin_entries
from shared import registry
from shared.plugins import SHOWN_DIGITS, describe
from shared.protocol.messages import PluginVersion
from shared.registry import Plugin
from shared.runtime.text_table import TextColumn, TextTable

GROUPS = {
    "algorithms": "algorithm",
    "allocators": "allocator",
    "codecs": "codec",
    "losses": "loss",
    "metrics": "metric",
    "models": "model",
    "sources": "source",
}
"""Kind of object by entry-point group."""
ANY = "any"
"""Kind of a listed `module:attribute`, which is known only where a plan uses it."""


class ListedPlugin(PluginVersion, frozen=True, kw_only=True, omit_defaults=False):
    """A plugin, and whether this server may import it."""

    listed: bool


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    help_ = "server's configuration file with its list of plugins; default: the list in FIELDFLEET_PLUGINS"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help_)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")


def plugins(options: argparse.Namespace) -> int:
    """List plugins with kind, name, distribution, version and digest; none is imported.

    Raises:
        ConfigError: The configuration file cannot be read.
    """
    if options.config:
        registry.allow([*registry.allowed_entries(), *plugin_entries(load(options.config))])
    listed = sorted([*_entry_points(), *_listed_attributes()], key=lambda plugin: (plugin.kind, plugin.name))
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(listed), indent=1).decode() + "\n")
    else:
        write_text(sys.stdout, _table(listed))
    return 0


def _entry_points() -> Iterator[ListedPlugin]:
    for group, kind in GROUPS.items():
        for name, plugin in registry.offered_plugins(group):
            yield _describe(plugin, kind, name, listed=registry.is_allowed(plugin, name))


def _listed_attributes() -> Iterator[ListedPlugin]:
    """Yield the entries of the allow-list that name modules, not distributions."""
    for entry in registry.allowed_entries():
        module, _, attribute = entry.partition(":")
        described = _describe(Plugin(module, attribute), ANY, entry, listed=True)
        if described.digest:  # else the entry names a distribution
            yield described


def _describe(plugin: Plugin, kind: str, name: str, *, listed: bool) -> ListedPlugin:
    return ListedPlugin(**msgspec.structs.asdict(describe(plugin, kind, name)), listed=listed)


def _table(listed: Sequence[ListedPlugin]) -> TextTable:
    columns = (
        *(TextColumn("kind"), TextColumn("name", least=12), TextColumn("distribution"), TextColumn("version")),
        *(TextColumn("digest"), TextColumn("listed")),
    )
    rows = [
        (
            *(plugin.kind, plugin.name, plugin.distribution or "-", plugin.version or "-"),
            *(plugin.digest[:SHOWN_DIGITS] or "-", "yes" if plugin.listed else "no"),
        )
        for plugin in listed
    ]
    caption = (
        "" if listed else "No plugins: no installed distribution has entry points fieldfleet.*, and none is listed."
    )
    return TextTable(columns, rows, caption=caption)
