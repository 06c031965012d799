"""What doctor says of upgrades."""

from __future__ import annotations

import pytest

from device_agent.commands.diagnosis.upgrades import check_trust, check_upgrade, examine_upgrade
from device_agent.upgrade.record import RECORD, UpgradeRecord, write_upgrade
from shared.runtime.folder_lock import hold_lock
from tests.device_agent.upgrade.packages import authorities

TRIAL = UpgradeRecord(state="trial", from_="1", to="2")


def states(home, roots):
    return [(one.name, one.state) for one in examine_upgrade(home, home, roots)]


def test_a_trial_that_nobody_watches_is_told(tmp_path):
    write_upgrade(tmp_path, TRIAL)
    roots = tmp_path / "roots.pem"
    assert states(tmp_path, roots) == [("upgrade", "bad"), ("packages", "ok")]
    with hold_lock(tmp_path):
        assert states(tmp_path, roots) == [("upgrade", "ok"), ("packages", "ok")]
    (tmp_path / RECORD).write_text("{")
    roots.write_text("none")
    assert states(tmp_path, roots) == [("upgrade", "bad"), ("packages", "warn")]
    roots.write_bytes(authorities("roof")[0])
    assert states(tmp_path, roots)[1] == ("packages", "ok")
    assert states(None, roots) == []


@pytest.mark.parametrize(
    ("record", "state"),
    [
        (UpgradeRecord(), "ok"),
        (UpgradeRecord(state="committed", to="2"), "ok"),
        (UpgradeRecord(state="committed", to="2", reason="asked for"), "bad"),
        (UpgradeRecord(state="rolled-back", to="2", reason="mute"), "warn"),
        (UpgradeRecord(state="refused", to="2", reason="no room"), "warn"),
    ],
)
def test_what_became_of_the_last_version_is_told(record, state):
    assert check_upgrade(record, "1", is_watched=False).state == state


def test_packages_are_taken_of_the_site_that_the_board_joined():
    assert check_trust([], "").state == check_trust([], "ab").state == check_trust(["ab"], "ab").state == "ok"
    assert check_trust(["ab"], "cd").state == "warn"
    assert "upgrade trust" in check_trust([], "ab").remedy
