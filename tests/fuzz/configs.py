"""Configurations: an agent's, a server's, a plan; TOML and JSON. The first byte of an input says which."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from device_agent.config import AgentConfig
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from edge_server.rounds import check_plan
from shared import config
from shared.errors import ConfigError
from tests.fuzz.trees import cut_and_spliced, damaged

KINDS: list[type[msgspec.Struct]] = [AgentConfig, ServerConfig, Plan]
SUFFIXES = (".toml", ".json")
PLAN = """
name = "demo"
rounds = 2
algorithm = { name = "fedprox", options = { mu = 0.1 } }
[model]
name = "mlp"
options.hidden = 8
[hyper]
batch_size = 16
momentum = 0.9
[cohort]
size = 2
over_selection = 0.5
[round]
quorum = 0.5
on_missed = "stop"
[evaluation]
on_device = true
[data]
source = "digits"
[partition]
kind = "shards"
[[device]]
name = "pi-0"
up_mbit_s = 5.0
[[device]]
name = "pi-1"
delay_s = 1e-2
"""
AGENT = """
device = "pi-4"                 # an agent
state_dir = '/var/lib/fieldfleet'
report_s = 5e1
log_level = "debug"
[broker]
host = "::1"
port = 0x75b
version = 3
[data]
source = "csv"
path = "a \\u00e9.csv"
holdout = 0.1
limit = 1_000
label_column = "class"
partition = { kind = "dirichlet", alpha = 0.5, parts = 4, index = 2 }
[link]
frame_bytes = 4096
[trainer]
idle_s = 12.5
"""
SERVER = """
plan = "demo.toml"
run = "demo-1"
site = "roof"
threads = 2
[broker]
keepalive_s = 30
[link]
window = 8
budget = 32
patience_s = 0.5
"""


def seeds() -> list[bytes]:
    """Return examples of all three, in both languages."""
    texts = list(enumerate((AGENT, SERVER, PLAN)))
    found = [bytes([kind]) + text.encode() for kind, text in texts]
    return found + [bytes([kind + 3]) + json.dumps(tomllib.loads(text)).encode() for kind, text in texts]


def read(data: bytes) -> str:
    """A configuration, or a ConfigError with a line and a remedy for each fault; what is read can be written again."""
    which = (data[0] if data else 0) % 6
    kind, path = KINDS[which % 3], Path("given").with_suffix(SUFFIXES[which // 3])
    try:
        found = config.parse(data[1:], kind, path)
        if isinstance(found, Plan):
            check_plan.check(found, path)
    except ConfigError as error:
        first, *others = str(error).split("\n")
        assert all(line.startswith(f"{path}: ") and "; " in line for line in others)
        problem, _, remedy = first.removeprefix(f"{path}: ").partition("; ")
        words = f"{remedy.partition(' (')[0] or 'no remedy'}: {kind.__name__}: {problem}"
    else:
        words = f"accepted: {kind.__name__}"
        _require_same(found)
    assert "\n" not in words
    return words


def _require_same(found: msgspec.Struct) -> None:
    if isinstance(found, Plan):  # stands in the journal, where a resumed run compares it
        assert config.parse(msgspec.json.encode(found), Plan, Path("journal.json")) == found
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


def mutate(data: bytes, random: Random) -> bytes:
    """Damage the tree that a text stands for, or the text."""
    which, text = (data[0] if data else 0) % 6, data[1:]
    if random.random() < 0.4:
        return bytes([which]) + cut_and_spliced(text, random)
    try:
        tree = tomllib.loads(text.decode()) if which < len(KINDS) else json.loads(text)
        tree = damaged(tree, random)
        written = toml(tree) if which < len(KINDS) else json.dumps(tree, default=repr)
        return bytes([which]) + written.encode(errors="replace")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return bytes([which]) + cut_and_spliced(text, random)


def toml(tree: dict[str, Any]) -> str:
    """Write a tree as TOML, everything below the first level inline."""
    return "".join(f"{json.dumps(str(key))} = {_inline(value)}\n" for key, value in tree.items())


def _inline(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(str(key))} = {_inline(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
