"""A site in one go: what it writes, who may read it, and that a second time changes nothing."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from edge_server.gateway.authority import BACKDATED
from edge_server.gateway.certificate_files import addresses_in
from edge_server.gateway.enrolment.accounts import SignedCertificate, SiteAccount
from edge_server.gateway.initialise import SiteSettings, initialise, link_services
from edge_server.gateway.site_folder import LOCAL_PAIRS, PAIRS, SiteFolder
from edge_server.gateway.state import lock_site, read_state, write_state
from edge_server.plan.server_config import load
from shared.errors import ConfigError
from tests.naming import naming

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
ROOF = SiteSettings("roof", ("gateway.local", "192.168.1.10"), 8883)


def made(folder, wanted=ROOF, now=NOW):
    """Return the state and what changed."""
    site = SiteFolder(folder)
    return initialise(site, wanted, now), site.changed


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.fixture
def folder(tmp_path):
    made(tmp_path / "site")
    return tmp_path / "site"


def test_it_writes_all_there_is(folder):
    pairs = {f"gateway/{name}.{part}" for name in (*PAIRS, *LOCAL_PAIRS) for part in ("key", "crt")}
    authorities = {f"ca/{one}" for one in ("root.key", "root.crt", "site.key", "site.crt", "chain.pem")}
    others = {
        "state.json",
        "accounts.sqlite",
        ".state.lock",
        "acl",
        "crl.pem",
        "mosquitto.conf",
        "server.toml",
        "gateway/own.pem",
    }
    assert set(contents(folder)) == pairs | authorities | others
    for name, path in ((one, folder / one) for one in contents(folder)):
        private = name.endswith((".key", ".lock", "state.json", ".sqlite"))
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if private else 0o644), name


def test_a_second_time_changes_nothing(folder):
    before = contents(folder)
    for wanted in (ROOF, SiteSettings(), SiteSettings("roof")):
        _, changed = made(folder, wanted, NOW + timedelta(days=400))
        assert changed == []
        assert contents(folder) == before


def test_another_address_makes_another_certificate_of_the_gateway_alone(folder):
    before = contents(folder)
    _, changed = made(folder, SiteSettings(addresses=("10.0.0.7",)))
    certificates = ["gateway/server.crt", "gateway/enrolment.crt"]
    assert sorted(changed) == sorted(["state.json", *certificates])
    assert {one for one, data in contents(folder).items() if data != before[one]} == {
        "state.json",
        "accounts.sqlite",
        *certificates,
    }
    assert addresses_in(certificate(folder / "gateway/server.crt"))[:1] == ("10.0.0.7",)


def test_another_port_is_the_brokers(folder):
    _, changed = made(folder, SiteSettings(port=9883, bind="127.0.0.1"))
    assert sorted(changed) == ["mosquitto.conf", "server.toml", "state.json"]
    assert "listener 9883 127.0.0.1\n" in (folder / "mosquitto.conf").read_text()
    assert load(folder / "server.toml").broker.port == 9884


def test_a_servers_file_of_before_that_nobody_edited_names_its_new_certificate(folder):
    path = folder / "server.toml"
    usual = path.read_text()
    path.write_text(usual.replace("own-server", "edge-server"))
    assert made(folder)[1] == ["server.toml"]
    assert path.read_text() == usual


def test_a_servers_file_that_was_edited_stays(folder):
    path = folder / "server.toml"
    path.write_text(path.read_text() + "\nthreads = 1\n")
    made(folder, SiteSettings(port=9883))
    assert path.read_text().endswith("threads = 1\n")


@pytest.mark.parametrize(
    "lost",
    ["acl", "crl.pem", "mosquitto.conf", "server.toml", "ca/chain.pem", "gateway/server.key", "gateway/probe.crt"],
)
def test_what_was_lost_or_damaged_is_made_again(folder, lost):
    before = contents(folder)
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"x")):
        spoil(folder / lost)
        if lost == "server.toml" and (folder / lost).exists():
            continue  # people edit it
        if lost.endswith(".key") and (folder / lost).exists():
            with pytest.raises(ConfigError):
                made(folder)
            (folder / lost).unlink()
        _, changed = made(folder)
        assert lost in changed
        assert made(folder)[1] == []
    if lost in ("acl", "mosquitto.conf", "ca/chain.pem"):
        assert contents(folder)[lost] == before[lost]


def test_the_roots_key_may_be_elsewhere_and_nothing_else(folder):
    (folder / "ca/root.key").unlink()
    assert made(folder)[1] == []
    (folder / "ca/site.crt").unlink()
    with pytest.raises(ConfigError, match=naming(folder / "ca/root.key")):
        made(folder)


def test_a_root_that_is_gone_is_not_made_again(folder):
    """Every board compares with it."""
    (folder / "ca/root.crt").unlink()
    with pytest.raises(ConfigError, match=naming(folder / "ca/root.crt")):
        made(folder)


def test_a_folder_is_one_sites(folder, tmp_path):
    with pytest.raises(ConfigError, match=naming(folder, "roof", "barn")):
        made(folder, SiteSettings("barn"))
    with pytest.raises(ConfigError, match=naming(tmp_path / "other", "--name")):
        made(tmp_path / "other", SiteSettings())
    for wrong in (SiteSettings("Roof"), SiteSettings("a/b"), SiteSettings("barn", ("a b",))):
        with pytest.raises(ConfigError):
            made(tmp_path / "other", wrong)
    assert not (tmp_path / "other").exists()


def test_a_certificate_of_every_part_is_in_the_state(folder):
    """What is not there could not be revoked; the one that probes are refused by is revoked from the start."""
    state = read_state(folder)
    signed = {one.serial: one for account in state.accounts.values() for one in account.certificates}
    for name in PAIRS:
        found = certificate(folder / f"gateway/{name}.crt")
        assert signed[f"{found.serial_number:x}"].revoked is (name == "revoked")
        assert found.not_valid_before_utc == NOW - BACKDATED
    listed = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
    assert [one.serial_number for one in listed] == [certificate(folder / "gateway/revoked.crt").serial_number]


def test_the_servers_file_reads(folder):
    config = load(folder / "server.toml")
    assert (config.site, config.broker.port) == ("roof", 8884)
    assert config.broker.tls
    assert all(Path(one).is_file() for one in (config.broker.tls.ca, config.broker.tls.cert, config.broker.tls.key))


def test_a_state_of_a_newer_version_is_refused(folder):
    with lock_site(folder):
        write_state(folder, msgspec.structs.replace(read_state(folder), version=3))
    with pytest.raises(ConfigError, match=naming(folder / "state.json", 3)):
        made(folder)


def test_a_state_survives_its_file(tmp_path):
    one = SignedCertificate(serial="a", authority="b", role="device", key="c", not_after_utc_s=1.5, revoked=True)
    state = read_state_of(tmp_path, accounts={"pi-03": SiteAccount(certificates=(one,), denied=True)})
    assert read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / "state.json").stat().st_mode) == 0o600


def read_state_of(folder, **fields):
    from edge_server.gateway.state import SiteState  # noqa: PLC0415 - for this alone

    state = SiteState(site="roof", **fields)
    write_state(folder, state)
    return state


def test_debians_mosquitto_and_the_units_find_a_site_in_its_usual_place(tmp_path):
    etc = tmp_path / "etc"
    (etc / "mosquitto/conf.d").mkdir(parents=True)
    site = SiteFolder(etc / "fieldfleet/site")
    initialise(site, ROOF, NOW)
    site.changed.clear()
    link_services(site, etc)
    assert len(site.changed) == 2
    assert (etc / "mosquitto/conf.d/fieldfleet.conf").read_bytes() == (site.path / "mosquitto.conf").read_bytes()
    assert load(etc / "fieldfleet/server.toml").site == "roof"
    (etc / "fieldfleet/server.toml").unlink()
    (etc / "fieldfleet/server.toml").write_text("ours")
    site.changed.clear()
    link_services(site, etc)
    link_services(SiteFolder(tmp_path / "elsewhere"), etc)
    assert site.changed == []
    assert (etc / "fieldfleet/server.toml").read_text() == "ours"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_gives_each_file_to_who_needs_it(tmp_path):
    site = SiteFolder(tmp_path / "site", "daemon", "nobody")
    initialise(site, ROOF, NOW)
    owners = {one: (tmp_path / "site" / one).owner() for one in contents(tmp_path / "site")}
    assert owners["gateway/server.key"] == "daemon"
    services = ("gateway/edge-server.key", "ca/site.key", "state.json", "accounts.sqlite", ".state.lock")
    assert {owners[one] for one in services} == {"nobody"}
    assert owners["ca/root.key"] == "root"
    assert "user daemon\n" in (tmp_path / "site/mosquitto.conf").read_text()
