"""Suggested install commands work: they name what a clone or a Debian package has, never a package index."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from device_agent.__main__ import COMMANDS as AGENT_COMMANDS
from edge_server.__main__ import COMMANDS as SERVER_COMMANDS
from shared.runtime import extras
from shared.runtime.extras import EXTRAS, SETUP_COMMANDS, install_command

ROOT = Path(__file__).parents[3]
COMMANDS = {"device-agent": AGENT_COMMANDS, "edge-server": SERVER_COMMANDS}


def test_the_command_for_a_clone_installs_this_clone_into_this_python():
    python, *words, target = shlex.split(install_command("device").strip("`"))
    assert Path(python) == Path(sys.executable)
    assert words == ["-m", "pip", "install", "-e"]
    assert Path(target.removesuffix("[device]")) == ROOT


def test_every_extra_is_one_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("extra", SETUP_COMMANDS)
def test_a_package_is_told_of_its_own_setup_command(extra, monkeypatch):
    monkeypatch.setattr(extras, "is_packaged", lambda: True)
    sudo, program, verb, *_ = shlex.split(install_command(extra).strip("`"))
    assert sudo == "sudo"
    assert verb in COMMANDS[program]


def test_no_message_names_the_distribution_on_an_index():
    """`fieldfleet` is on no package index, so `pip install fieldfleet...` installs a stranger's code, or nothing."""
    sources = [path for package in ("shared", "device_agent", "edge_server") for path in (ROOT / package).rglob("*.py")]
    pages = [path for path in ROOT.rglob("*.md") if ".venv" not in path.parts]
    texts = [(path, path.read_text()) for path in sources + pages]
    bad = [path for path, text in texts if "pip install fieldfleet" in text or "'fieldfleet[" in text]
    assert [path for path in bad if path.name != "CHANGELOG.md"] == []  # what earlier versions said is history
