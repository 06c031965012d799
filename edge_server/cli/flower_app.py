"""`edge-server flower-app`: write the plan of a Flower app, and run it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_server.cli import folders
from shared import registry
from shared.errors import ConfigError
from shared.protocol.messages import Scalar

PROJECT = "pyproject.toml"
USUAL_DEVICES, USUAL_ROUNDS = 3, 3
ROUNDS_KEY, FRACTION_KEYS = "num-server-rounds", ("fraction-train", "fraction-fit")
USUAL_MODEL = "task:Net"
"""Module beside the `ClientApp`, and name of the network, in the apps of `flwr new`."""


@dataclass(frozen=True)
class App:
    """A Flower app's `pyproject.toml`.

    Attributes:
        client: Its `ClientApp` as `module:attribute`.
        config: Its run config, with nested keys joined by dots.
        nodes: Number of nodes of its default federation; 0 if it names none.
    """

    name: str
    client: str
    config: Mapping[str, Scalar]
    nodes: int


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("app", type=Path, metavar="PATH", help=f"folder of the app, with its {PROJECT}")
    help_ = "number of agents, or names of boards separated by commas; default: the app's num-supernodes, else 3"
    parser.add_argument("--devices", default="", metavar="N|NAMES", help=help_)
    help_ = (
        "network whose state_dict the app exchanges, or a function that returns the list of its arrays; "
        f"default: {USUAL_MODEL} of the app's package"
    )
    parser.add_argument("--model", default="", metavar="MODULE:NET", help=help_)
    help_ = "replace a value of [tool.flwr.app.config]; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help_)
    help_ = "send a value in the config of messages, as the app's strategy does; may be repeated"
    parser.add_argument("--message", action="append", default=[], metavar="KEY=VALUE", help=help_)
    help_ = "plan file to write; default: NAME.toml in the current folder"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, metavar="FILE", help="use the boards of the site of this server.toml")
    where.add_argument("--replay", action="store_true", help="run in virtual time instead of with agents and a broker")
    where.add_argument("--write-only", action="store_true", help="write the plan, and do not run it")
    help_ = "with agents on this machine: name of the run; the name of an interrupted run resumes it"
    parser.add_argument("--run", default="", metavar="NAME", help=help_)
    parser.add_argument("--embedded-broker", action="store_true", help=folders.EMBEDDED_HELP)
    folders.add_options(parser, data=True, form=True, config=False)


def prepare(options: argparse.Namespace) -> Path:
    """Write the plan, and make the app importable and allowed for this process and its children; return the plan.

    Raises:
        ConfigError: The app or an option is invalid.
    """
    from shared.algorithms.flower import MESSAGE_PREFIX  # noqa: PLC0415 - torch

    app = read_app(options.app)
    names = name_devices(options.devices, app.nodes)
    root = str(options.app.resolve())
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    model = options.model or find_model(app)
    registry.allow([*registry.allowed_entries(), app.client, model])
    path: Path = options.out or Path(f"{app.name}.toml")
    config = {**app.config, **parse_settings("--set", options.set)}
    sent = {f"{MESSAGE_PREFIX}{key}": value for key, value in parse_settings("--message", options.message).items()}
    path.write_text(format_plan(app, model, names, config, sent))
    return path


def read_app(folder: Path) -> App:
    """Read a Flower app's `pyproject.toml`.

    Raises:
        ConfigError: There is none, or it names no `ClientApp`.
    """
    path = folder / PROJECT
    try:
        project = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name the folder of a Flower app") from error
    flower = project.get("tool", {}).get("flwr", {})
    settings = flower.get("app", {})
    client = settings.get("components", {}).get("clientapp", "")
    if ":" not in client:
        raise ConfigError(f"{path}: [tool.flwr.app.components] has no clientapp as module:attribute; add it")
    federations = flower.get("federations", {})
    federation = federations.get(federations.get("default", ""), {})
    nodes = federation.get("options", {}).get("num-supernodes", 0) if isinstance(federation, dict) else 0
    name = str(project.get("project", {}).get("name", folder.resolve().name))
    return App(name, client, dict(_flatten_config("", settings.get("config", {}))), int(nodes))


def _flatten_config(prefix: str, table: Mapping[str, Any]) -> Iterable[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten_config(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def name_devices(text: str, nodes: int) -> list[str]:
    """Return the names of the devices: those of `--devices`, or numbered ones.

    Raises:
        ConfigError: The number is not above zero.
    """
    if text and not text.isdecimal():
        return [name.strip() for name in text.split(",")]
    count = int(text) if text else nodes or USUAL_DEVICES
    if count < 1:
        raise ConfigError(f"--devices {text}: use 1 or more, or names separated by commas")
    return [f"node-{place}" for place in range(count)]


def find_model(app: App) -> str:
    """Return the app's network by its usual name.

    Raises:
        ConfigError: There is none of that name.
    """
    module, _, name = USUAL_MODEL.partition(":")
    package = app.client.partition(":")[0].rpartition(".")[0]
    full = f"{package}.{module}" if package else module
    try:
        found = getattr(importlib.import_module(full), name, None)
    except registry.FAULTS as error:
        remedy = "install what the app needs, or name its network by --model MODULE:NET"
        raise ConfigError(f"{full}: {type(error).__name__}: {error}; {remedy}") from error
    if found is None:
        remedy = "name the app's network, or a function that returns its arrays, by --model MODULE:NAME"
        raise ConfigError(f"{full} has no {name}; {remedy}")
    return f"{full}:{name}"


def parse_settings(option: str, entries: Iterable[str]) -> dict[str, Scalar]:
    """Parse `KEY=VALUE` with values as in TOML; a value that is none there is text.

    Raises:
        ConfigError: An entry has no `=`.
    """
    settings = dict[str, Scalar]()
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not key or not equals:
            raise ConfigError(f"{option} {entry}: use KEY=VALUE")
        try:
            settings[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key.strip()] = value
    return settings


def format_plan(
    app: App, model: str, names: list[str], config: Mapping[str, Scalar], sent: Mapping[str, Scalar]
) -> str:
    """Return the plan as TOML: the app's config are options of algorithm `flower`, and devices evaluate each round."""
    share = float(next((config[key] for key in FRACTION_KEYS if key in config), 1.0))
    options = {"app": app.client, "devices": ",".join(names), **config, **sent}
    lines = [
        f"# Plan of the Flower app {app.name}, written by `edge-server flower-app`",
        f"name = {json.dumps(app.name)}",
        f"rounds = {config.get(ROUNDS_KEY, USUAL_ROUNDS)}",
        "",
        "[algorithm]",
        'name = "flower"',
        "[algorithm.options]",
        *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in options.items()),
        "",
        "[model]",
        f"name = {json.dumps(model)}",
        "",
        "[data]",
        'source = "none" # the app reads its own examples',
        "",
        "[cohort]",
        f"size = {max(1, int(share * len(names))) if share < 1 else 0}",
        f"min_devices = {len(names)}",
        "",
        "[evaluation]",
        "every = 0",
        "devices_every = 1",
        *(line for name in names for line in ("", "[[device]]", f"name = {json.dumps(name)}")),
    ]
    return "\n".join(lines) + "\n"
