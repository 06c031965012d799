"""Every key of a plan is shown by a shipped file, and every example is a valid plan."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.plan.check import check_plan
from edge_server.cli.plan.reference import plan_keys

ROOT = Path(__file__).parents[3]
PLANS = sorted((ROOT / "deploy" / "plans").rglob("*.toml"))
EXAMPLES = [path for path in PLANS if path.parent.name == "options"]
AGENTS_ONLY = {
    ("[data]", "partition"),  # a plan has [partition] instead
    ("[data]", "without"),  # derived from [server_data] drawn
}
OF_PROJECTS = {("Top of the file", "project"), ("[data]", "options")}
"""Keys of a user's own code; a plan in deploy/plans belongs to no project."""
HEADINGS = {
    "": "Top of the file",
    "device": "[[device]]",
    "server_data": "[data]",
    "target": "[task.target]",
    "drawn": "[data.drawn]",
    "window": "[data.window]",
    "mel": "[data.mel]",
    "model": "[model]",
    "codec": "[algorithm]",
    "cut_codec": "[algorithm]",
}
"""Headings of tables that share a section or differ from their key."""
Entry = tuple[str, str]


def table_entries(path: str, table: dict[str, Any]) -> Iterator[Entry]:
    """Yield section and key of every entry of a table of a plan, at any depth."""
    last = path.rpartition(".")[2]
    kind = f' kind = "{table["kind"]}"' if path.startswith("device.") else ""
    heading = HEADINGS.get(last, f"[{path if kind else last}]{kind}")
    for key, value in table.items():
        yield heading, key
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and key == "options":
                section = f"[{last.removeprefix('cut_')}.options]"
                yield from ((f"{section} of {table['name']}", option) for option in item)
            elif isinstance(item, dict) and key not in ("clusters", "where"):
                yield from table_entries(f"{path}.{key}".lstrip("."), item)


def reference_entries() -> Iterator[tuple[str, str, list[str]]]:
    """Yield section, key and, for options, the names that have them, for every key of the reference."""
    for group in plan_keys():
        heading, _, names = group.heading.partition(" of ") if ".options]" in group.heading else (group.heading, "", "")
        for key in group.keys:
            yield heading, key.name, re.findall(r'"(\w+)"', names)


def is_shown(found: set[Entry], heading: str, key: str, names: list[str]) -> bool:
    """Return whether an example has a key; an option of a network counts for every network."""
    if key == "NAME_OPTION":
        owners = [f"{heading} of {name}" for name in names or ["chain"]]
        return any(option.startswith(("quantize_", "message.")) for section, option in found if section in owners)
    if heading == "[model.options]":
        return any(section.startswith(heading) and option == key for section, option in found)
    if names:
        return any((f"{heading} of {name}", key) in found for name in names)
    return (heading, key) in found


def test_every_key_of_a_plan_is_in_a_shipped_plan():
    found = {entry for path in PLANS for entry in table_entries("", tomllib.loads(path.read_text()))}
    missing = [
        f"{heading}{' of ' + names[0] if names else ''}: {key}"
        for heading, key, names in reference_entries()
        if not is_shown(found, heading, key, names)
        and (heading, key) not in AGENTS_ONLY | OF_PROJECTS
        and not heading.startswith("[data.partition]")
    ]
    assert missing == [], "add them to a file in deploy/plans/options"


def test_agents_only_keys_are_keys():
    assert {(heading, key) for heading, key, _ in reference_entries()} >= AGENTS_ONLY | OF_PROJECTS


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_passes_the_check(path, tmp_path):
    """Without data sets: with the fallback of the plan, or handwritten digits."""
    assert check_plan(path, tmp_path).rounds >= 1
