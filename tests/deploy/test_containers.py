"""Dockerfiles and compose name commands, users, files and volumes that the packages have, and confine every service."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from device_agent.__main__ import COMMANDS as AGENT_COMMANDS
from device_agent.__main__ import build_parser as agent_parser
from edge_server.__main__ import build_parser as server_parser
from edge_server.gateway.broker_files import BrokerPaths, broker_conf
from edge_server.gateway.initialise import DEFAULT_DATA, DEFAULT_PORT
from edge_server.gateway.site_folder import BROKER_USER, DEFAULT_FOLDER

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())
SERVICES = COMPOSE["services"]
PARSERS = {"edge-server": server_parser(), "device-agent": agent_parser(AGENT_COMMANDS)}
ENROLMENT_PORT = PARSERS["edge-server"].parse_args(["enrolment-service"]).port
LONG = ("broker", "enrolment", "server")


@pytest.fixture(scope="module")
def packages():
    folder = str(ROOT / "deploy" / "debian")
    sys.path.insert(0, folder)
    try:
        build = import_module("build")
    finally:
        sys.path.remove(folder)
    return {"gateway": build.SERVER, "agent": build.AGENT}


def check_command(words: list[str]) -> None:
    """Have the command line itself read the words; an option that is none ends the test."""
    if words[0] in PARSERS:
        PARSERS[words[0]].parse_args(words[1:])
    else:
        assert words == ["mosquitto", "-c", f"{DEFAULT_FOLDER}/mosquitto.conf"]


@pytest.mark.parametrize("image", ["gateway", "agent"])
def test_an_image_is_its_package(packages, image):
    text = (FOLDER / f"{image}.Dockerfile").read_text()
    package = packages[image]
    assert f"COPY build/deb/{package.name}_*+py3_${{TARGETARCH}}.deb" in text
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == [package.user]
    assert f'"/var/lib/{package.user}"' in re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)[0]
    [last] = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    check_command(yaml.safe_load(last))
    unit = (ROOT / "deploy/systemd" / f"{package.name}.service").read_text()
    assert " ".join(yaml.safe_load(last)) in unit  # what systemd would run
    for line in re.findall(rf"{package.command} setup [^;]*", text):
        check_command(line.replace('"$INDEX"', "https://localhost").replace('"$PURPOSE"', "train").split())


def test_compose_runs_commands_that_there_are_as_users_that_there_are(packages):
    for name, service in SERVICES.items():
        words = service["command"]
        if words[0] == "sh":
            made, _, laid = words[2].partition(" && ")
            check_command(made.replace('"$$SITE"', "roof").replace('"$$ADDRESS"', "localhost").split())
            assert laid == f"install -m 0644 /plan.toml {DEFAULT_FOLDER}/"
        else:
            check_command(words)
        if name in LONG and service["healthcheck"]["test"][1] in PARSERS:
            check_command(service["healthcheck"]["test"][1:])
        assert service["user"] in ("root", BROKER_USER, packages["gateway"].user)
    assert [name for name, service in SERVICES.items() if service["user"] == "root"] == ["site"]


def test_compose_confines_every_service():
    for name, service in SERVICES.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert ("cap_add" in service) == (name == "site")
        assert ("healthcheck" in service) == (name in LONG)


def test_compose_lays_volumes_and_ports_where_the_server_has_them():
    mounted = {line.split(":")[0]: line.split(":")[1] for one in SERVICES.values() for line in one["volumes"]}
    assert mounted["site"] == str(DEFAULT_FOLDER)
    assert Path(DEFAULT_DATA).is_relative_to(mounted["state"])
    assert set(COMPOSE["volumes"]) == {"site", "state"}
    assert SERVICES["broker"]["ports"] == [f"{port}:{port}" for port in (DEFAULT_PORT, ENROLMENT_PORT)]
    places = BrokerPaths(*(Path("/x"),) * 6)
    assert f"listener {DEFAULT_PORT + 1} 127.0.0.1" in broker_conf(places, port=DEFAULT_PORT, own_port=DEFAULT_PORT + 1)
    assert str(DEFAULT_PORT + 1) in SERVICES["broker"]["healthcheck"]["test"][-1]
    assert str(ENROLMENT_PORT) in SERVICES["enrolment"]["healthcheck"]["test"][-1]
