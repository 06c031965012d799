"""Doctor's identity checks, each from its inputs, and repaired files."""

from __future__ import annotations

import pytest

from device_agent.commands.diagnosis import identity
from device_agent.commands.diagnosis.identity import DAY_S
from device_agent.config import load
from device_agent.identity.credentials import Membership
from shared.transport.base import Broker
from tests.device_agent.agent_side import write_config
from tests.edge_server.gateway.enrolments import Authority
from tests.naming import names_all

NOW = 1_800_000_000.0
JOINED = Membership(
    device="pi-03",
    site="roof",
    token="abc",  # noqa: S106 - its id
    host="gateway.local",
    port=8443,
    root="00",
    broker_host="gateway.local",
    broker_port=8883,
    not_before_utc_s=NOW,
    not_after_utc_s=NOW + 365 * DAY_S,
)


@pytest.mark.parametrize(
    ("days", "may_judge", "state", "words"),
    [
        (100, True, "ok", ""),
        (340, True, "warn", "25 days"),
        (366, True, "bad", ""),
        (-1, True, "bad", ""),
        (366, False, "ok", ""),
    ],
)
def test_when_a_certificate_ends(days, may_judge, state, words):
    check = identity.check_dates(NOW, NOW + 365 * DAY_S, NOW + days * DAY_S, may_judge=may_judge)
    assert (check.state, words in check.finding, bool(check.remedy)) == (state, True, state != "ok"), check
    assert names_all(check.finding, identity.utc_text(NOW), identity.utc_text(NOW + 365 * DAY_S))


def test_a_certificate_that_begins_later_has_another_remedy_than_one_that_ended():
    early, late = (
        identity.check_dates(NOW, NOW + DAY_S, NOW + days * DAY_S, may_judge=True).remedy for days in (-1, 2)
    )
    assert "edge-server devices approve" in late
    assert "edge-server devices approve" not in early


@pytest.mark.parametrize(("now", "may_judge", "state"), [(NOW, True, "ok"), (0.0, False, "warn"), (NOW, False, "ok")])
def test_which_clock_counts(now, may_judge, state):
    check = identity.check_clock_use(now, NOW - 1, may_judge=may_judge)
    assert (check.state, identity.utc_text(now) in check.finding) == (state, True), check
    assert (identity.utc_text(NOW - 1) in check.finding) == (state == "warn"), check


def test_whether_the_clock_is_believed_is_said():
    believed, doubted = (identity.check_clock_use(NOW, NOW - 1, may_judge=may_judge) for may_judge in (True, False))
    assert believed.finding != doubted.finding


def test_whether_it_joined():
    finding = identity.check_enrolment(JOINED, Broker()).finding
    assert names_all(finding, "pi-03", "roof", "gateway.local:8443")
    assert "join -" in identity.check_enrolment(None, Broker()).remedy
    assert identity.check_enrolment(None, Broker(user="us")).remedy == ""


@pytest.mark.parametrize(
    ("told", "state", "words"),
    [
        ({"LoadState": "not-found"}, "ok", identity.UNIT),
        ({"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled"}, "ok", "enabled"),
        ({"LoadState": "loaded", "ActiveState": "failed", "Result": "watchdog"}, "warn", "watchdog"),
        ({"LoadState": "loaded", "ActiveState": "inactive", "UnitFileState": "disabled"}, "warn", "inactive"),
    ],
)
def test_the_service(told, state, words):
    check = identity.check_service(told)
    assert (check.state, words in check.finding, bool(check.remedy)) == (state, True, state != "ok"), check


def test_pair_and_modes_are_examined_and_modes_mended(tmp_path):
    authority = Authority(tmp_path / "ca")
    ours, other = authority.issue("board"), authority.issue("other")
    path = write_config(tmp_path, 1)
    text = path.read_text().replace(
        "[broker]\n", f'[broker]\ntls = {{ ca = "{ours.ca}", cert = "{ours.cert}", key = "KEY" }}\n'
    )

    def states(key: str) -> dict[str, str]:
        path.write_text(text.replace("KEY", key))
        return {one.name: one.state for one in identity.examine_identity(load(path))}

    assert states(ours.key) == states(ours.key) | dict.fromkeys(("pair", "certificate", "secrets", "enrolment"), "ok")
    assert states(other.key)["pair"] == "bad"
    assert states(str(tmp_path / "none"))["secrets"] == "bad"
    (tmp_path / "ca/board.key").chmod(0o644)
    assert (states(ours.key)["pair"], states(ours.key)["secrets"]) == ("bad", "bad")
    [done] = identity.fix_modes(load(path).broker)
    assert (done.state, str(tmp_path / "ca/board.key") in done.finding) == ("ok", True)
    assert (states(ours.key)["pair"], states(ours.key)["secrets"]) == ("ok", "ok")
    assert list(identity.fix_modes(load(path).broker)) == []
    (tmp_path / "ca/board.crt").write_text("none")
    assert states(ours.key)["certificate"] == "bad"
