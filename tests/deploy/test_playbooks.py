"""The Ansible collection names commands, settings and services that there are; `make fresh ANSIBLE=1` runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, StrictUndefined
from jinja2.nativetypes import NativeEnvironment

from device_agent.__main__ import COMMANDS as AGENT_COMMANDS
from device_agent.__main__ import build_parser as agent_parser
from device_agent.config import load_file
from edge_server.__main__ import build_parser as server_parser

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "deploy" / "ansible"
FILES = sorted([*ANSIBLE.rglob("*.yml")])
ROLES = ("package", "gateway", "board")
PARSERS = {"edge-server": server_parser(), "device-agent": agent_parser(AGENT_COMMANDS)}
OTHERS = {"dpkg", "dpkg-query", "grep", "runuser"}
"""Commands that Debian's base system has."""

ON_DEMAND = {"fieldfleet-upgrade", "fieldfleet-check"}
"""Their packages enable them; the agent's wish, or a timer, starts them."""
SERVICES = {"mosquitto", *(path.stem for path in (ROOT / "deploy" / "systemd").glob("*.service"))} - ON_DEMAND
TOLD = {
    "inventory_hostname": "pi-01",
    "groups": {"gateway": ["roof-gateway"]},
    "package_name": "fieldfleet-agent",
    "board": "pi-01",
}
"""What Ansible knows by itself, or the operator says in the command line."""


def read(path: Path):
    return yaml.safe_load(path.read_text())


def tasks_in(found) -> Iterator[dict]:
    """Yield all tasks of a file's content, those of blocks and plays too."""
    for one in found if isinstance(found, list) else []:
        yield one
        for inner in ("tasks", "block", "handlers"):
            yield from tasks_in(one.get(inner))


def tasks() -> list[dict]:
    return [task for path in FILES for task in tasks_in(read(path))]


def render(what, known: dict):
    """Return what Ansible would make of a value."""
    if isinstance(what, list):
        return [render(one, known) for one in what]
    if not isinstance(what, str) or "{{" not in what:
        return what
    surroundings = NativeEnvironment(undefined=StrictUndefined)
    surroundings.filters |= {"product": product, "flatten": lambda lists: [one for some in lists for one in some]}
    return surroundings.from_string(what).render(known)


def settings() -> dict:
    """Return the variables of the example's machines, over the roles' defaults."""
    groups = read(ANSIBLE / "inventory.example.yml")["all"]
    known = dict(TOLD)
    for role in ROLES:
        known |= read(ANSIBLE / "roles" / role / "defaults/main.yml")
    known |= groups["vars"]
    for group in groups["children"].values():
        known |= group.get("vars", {}) | (next(iter(group["hosts"].values())) or {})
    return {name: render(value, known) for name, value in known.items()}


def commands() -> Iterator[list[str]]:
    """Yield every command line of the collection, as the example's inventory has it."""
    known = settings()
    rotate = read(ANSIBLE / "playbooks/rotate.yml")[0]["vars"]
    for task in tasks():
        if (command := task.get("ansible.builtin.command")) is not None:
            for chosen in rotate["rotate_words"] if "rotate_words" in str(command) else [""]:
                line = render(command["argv"], known | rotate | {"rotate": chosen})
                yield [str(word) for word in line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ANSIBLE)))
def test_every_file_is_one_document(path):
    assert path.read_text().startswith("---\n")
    assert read(path)


def test_commands_are_as_our_command_lines_have_them():
    found = [line[line.index("--") + 1 :] if line[0] == "runuser" else line for line in commands()]
    ours = [line for line in found if line[0] in PARSERS]
    for line in ours:
        PARSERS[line[0]].parse_args(line[1:])  # ends the test where an option is none
    assert {line[0] for line in found} <= {*PARSERS, *OTHERS}
    verbs = {" ".join(line[: 3 if line[1] == "site" else 2]) for line in ours}
    assert verbs == {
        "device-agent join",
        "device-agent setup",
        "edge-server enrol",
        "edge-server revoke",
        "edge-server setup",
        "edge-server site init",
        "edge-server site rotate-ca",
        "edge-server site rotate-root",
        "edge-server site rotate-server",
    }


@pytest.mark.parametrize("may", [False, True])
def test_a_revoked_board_is_let_in_again_only_where_the_inventory_says_so(may):
    [enrol] = [one for task in tasks() if "'enrol'" in str(one := task.get("ansible.builtin.command"))]
    line = render(enrol["argv"], settings() | {"board_readmit": may})
    assert PARSERS["edge-server"].parse_args([str(word) for word in line[1:]]).readmit == may


def test_each_role_says_what_it_takes():
    """A variable that is used is a role's own, is told by another task, or comes from Ansible."""
    for role in ROLES:
        folder = ANSIBLE / "roles" / role
        options = read(folder / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
        usual = read(folder / "defaults/main.yml")
        assert set(usual) == {name for name, one in options.items() if not one.get("required")}
        assert usual == {name: one["default"] for name, one in options.items() if name in usual}
        text = "".join(path.read_text() for path in folder.rglob("*") if path.suffix in (".yml", ".j2"))
        told = set(re.findall(rf"^ +({role}_\w+):", text, re.MULTILINE))
        told |= set(re.findall(rf"register: ({role}_\w+)", text))
        assert set(re.findall(rf"\b({role}_\w+)", text)) <= told | set(options)


def test_the_agents_file_of_the_example_is_one(tmp_path):
    surroundings = Environment(undefined=StrictUndefined, trim_blocks=True, autoescape=False)  # noqa: S701 - no page
    surroundings.filters["to_json"] = lambda value, ensure_ascii: json.dumps(value, ensure_ascii=ensure_ascii)
    text = (ANSIBLE / "roles/board/templates/agent.toml.j2").read_text()
    hosts = read(ANSIBLE / "inventory.example.yml")["all"]["children"]["boards"]
    for own in (hosts["vars"], hosts["hosts"]["pi-02"]):
        path = tmp_path / "agent.toml"
        path.write_text(str(surroundings.from_string(text).render(board_settings=own["board_settings"])))
        config = load_file(path)
        assert config.data.path == own["board_settings"]["data"]["path"]
        assert config.trainer.threads == own["board_settings"].get("trainer", {}).get("threads", 0)


def test_what_a_token_passes_through_is_not_logged():
    secret = [task for task in tasks() if re.search(r"'enrol'|board_token", json.dumps(task).replace('"', "'"))]
    assert len(secret) == 2
    assert all(task["no_log"] for task in secret)


def test_services_are_ours():
    known = settings()
    units = [
        task["ansible.builtin.systemd_service"]["name"] for task in tasks() if "ansible.builtin.systemd_service" in task
    ]
    loops = [task["loop"] for task in tasks() if "ansible.builtin.systemd_service" in task and "loop" in task]
    named = {name for name in units if "{{" not in name} | {name for loop in loops for name in render(loop, known)}
    assert named == SERVICES


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_the_package_role_finds_files_as_they_are_built(arch, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "debian"))
    target = import_module("build").Target(arch, "0.2.0", 0)
    [task] = [one for one in tasks() if one.get("name") == "Look for the package"]
    facts = {
        "package_architecture": {"stdout": arch},
        "package_folder": "/srv",
        "package_name": "fieldfleet-agent",
        "package_version": "",
    }
    system = render(task["vars"]["package_system"], facts)
    pattern = render(task["vars"]["package_pattern"], facts | {"package_system": system})
    assert fnmatch(f"/srv/fieldfleet-agent_{target.full_version}_{arch}.deb", pattern)
