"""`edge-server rollout start --agent`: refusals and interruptions name the remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.store import add_packages, packages_folder
from edge_server.gateway.site_folder import SiteFolder
from edge_server.journal.rollouts.file import RolloutPlan, WaveOpened, rollout_names
from edge_server.release.rollout import drive
from edge_server.release.rollout.agents import find_agent
from edge_server.release.rollout.orders import begin_rollout
from shared.errors import CorruptFile
from tests.edge_server.gateway.sites import now, put_deb
from tests.edge_server.processes import Ended, captured
from tests.machine import free_port
from tests.naming import names_all, naming

TERMS = RolloutPlan(deployment="", release="", sha256="")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return the folder of a site that has a version of the agent."""
    here = tmp_path_factory.mktemp("gateway")
    site = SiteFolder(here / "site")
    initialise(site, SiteSettings("roof", ("127.0.0.1",), port=free_port()), now())
    add_packages(site, [put_deb(here / "debs", "0.4.0")])
    return site.path


@pytest.fixture
def site(made, tmp_path, monkeypatch) -> Path:
    """Return a copy of it, at whose broker nobody is."""
    monkeypatch.setattr(drive, "CONNECT_S", 0.2)
    shutil.copytree(made, tmp_path / "site", symlinks=True)
    config = tmp_path / "site/server.toml"
    config.write_text(config.read_text().replace(str(made), str(tmp_path / "site")))
    return tmp_path / "site"


def start(site: Path, version: str, *more: object) -> Ended:
    """Begin a rollout."""
    words = ("--config", site / "server.toml", "--data-dir", site.parent / "runs")
    return captured("rollout", "start", "--agent", version, *words, *more)


def begun(site: Path) -> bool:
    return bool(rollout_names(site.parent / "runs"))


def test_a_version_that_the_gateway_has_not_signed_is_refused_although_its_package_lies_there(site):
    put_deb(packages_folder(site), "0.5.0")
    for version in ("0.5.0", "9", "fieldfleet-agent/7"):
        ended = start(site, version)
        assert ended.code == 2
        assert names_all(ended.err, version.removeprefix("fieldfleet-agent/"), "0.4.0", "edge-server packages add")
    assert not begun(site)


def test_a_package_that_is_not_what_was_signed_is_not_offered(site):
    [package] = packages_folder(site).glob("*.deb")
    for spoil in (lambda: package.write_bytes(package.read_bytes() + b"x"), package.unlink):
        spoil()
        with pytest.raises(CorruptFile, match=naming(package, "edge-server packages remove", "packages add")):
            begin_rollout(site.parent / "runs", find_agent(site, "0.4.0"), TERMS)
    assert not begun(site)


def test_a_second_rollout_names_the_first_and_what_ends_it(site):
    known = begin_rollout(site.parent / "runs", find_agent(site, "0.4.0"), TERMS)
    known.journal.append(WaveOpened(at="20260101T000000Z", devices={"pi-1": "pi-4"}))
    ended = start(site, "0.4.0")
    assert ended.code == 2
    assert names_all(ended.err, known.state.plan.deployment, "fieldfleet-agent/1", "going")
    assert names_all(ended.err, "edge-server rollout resume", "abort", "back")


def test_without_a_broker_nothing_begins_and_its_start_is_named(site):
    ended = start(site, "0.4.0")
    assert ended.code == 1
    assert names_all(ended.err, "127.0.0.1", "systemctl start mosquitto", "edge-server doctor")
    assert not begun(site)


def test_a_server_without_a_site_has_no_packages_to_offer(site):
    config = site / "server.toml"
    config.write_text("".join(line + "\n" for line in config.read_text().splitlines() if "gateway = " not in line))
    ended = start(site, "0.4.0")
    assert ended.code == 2
    assert names_all(ended.err, "gateway", "edge-server site init")
