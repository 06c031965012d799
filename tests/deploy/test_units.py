"""What systemd is told of our services: how little they may do, as systemd itself judges it."""

from __future__ import annotations

import configparser
import shutil
import subprocess  # noqa: TID251 - asks systemd
import tomllib
from pathlib import Path

import pytest

from device_agent.__main__ import EXIT_CONFIG
from device_agent.upgrade.record import FOLDER, WANTED
from firmware_profiles import __file__ as profiles

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
OURS = sorted(path.name for path in UNITS.glob("*.service"))
MOSQUITTO = """[Unit]
Description=Mosquitto MQTT Broker
[Service]
Type=notify
NotifyAccess=main
ExecStart=/usr/sbin/mosquitto -c /etc/mosquitto/mosquitto.conf
ExecStartPre=/bin/mkdir -m 740 -p /run/mosquitto
ExecStartPre=/bin/chown mosquitto /run/mosquitto
"""
"""As Debian's package says it, as far as it is of interest here."""


class Unit(configparser.RawConfigParser):
    """A unit's file, of whose keys that come several times the last one counts."""

    optionxform = staticmethod(str)

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",), interpolation=None)
        self.read_string((UNITS / name).read_text())


def judge(folder: Path, unit: str, most: float) -> subprocess.CompletedProcess[str]:
    """Ask systemd how exposed a unit of a root folder is: 0 for nothing that it may do, 10 for everything."""
    asked = ["systemd-analyze", "security", "--offline=true", f"--threshold={most * 10:.0f}", f"--root={folder}", unit]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - its own options
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250 and judges no files")
    return done


@pytest.fixture
def installed(tmp_path):
    """Return the root folder of a system with our units, as the packages lay them."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed here")
    units = tmp_path / "usr/lib/systemd/system"
    dropped = units / "mosquitto.service.d"
    dropped.mkdir(parents=True)
    for name in OURS:
        shutil.copy(UNITS / name, units)
    (units / "mosquitto.service").write_text(MOSQUITTO)
    shutil.copy(UNITS / "mosquitto.conf", dropped / "fieldfleet.conf")
    return tmp_path


LOOKS = "fieldfleet-check.service"
"""It looks for another user's process, and may end it."""


@pytest.mark.parametrize("unit", OURS)
def test_our_services_may_do_little(installed, unit):
    done = judge(installed, unit, 3.0 if unit == LOOKS else 2.0)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_broker_may_do_little(installed):
    done = judge(installed, "mosquitto.service", 4.0)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_can_read_our_units(installed):
    """Each key is one that it knows, of a form that it knows."""
    units = installed / "usr/lib/systemd/system"
    for path in (*UNITS.glob("*.path"), *UNITS.glob("*.timer")):
        shutil.copy(path, units)
    for name in ("sysinit", "basic", "multi-user", "network-online", "time-sync", "shutdown", "paths", "timers"):
        (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
    for name in ("device-agent", "edge-server"):
        program = installed / "usr/bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    names = [*OURS, *(path.name for end in ("path", "timer") for path in UNITS.glob(f"*.{end}"))]
    asked = ["systemd-analyze", "verify", "--man=no", f"--root={installed}", *names]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - its own options
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_upgrade_is_decided_before_the_agent_starts_and_may_write_versions_and_the_agents_folder():
    unit = Unit("fieldfleet-upgrade.service")
    assert unit["Unit"]["Before"] == "fieldfleet-agent.service"
    service = unit["Service"]
    assert (service["User"], service["Type"]) == ("root", "notify")
    assert service["ReadWritePaths"].split() == ["/opt/fieldfleet", "-/var/lib/fieldfleet"]
    assert set(service["CapabilityBoundingSet"].split()) == {"CAP_SETUID", "CAP_SETGID"}
    assert service["Restart"] == "on-failure"
    path = Unit("fieldfleet-upgrade.path")["Path"]
    assert path["PathChanged"] == f"/var/lib/fieldfleet/{FOLDER}/{WANTED}"


ONCE = {"fieldfleet-upgrade.service", "fieldfleet-check.service"}
"""Services that do one thing and end."""


@pytest.mark.parametrize("unit", [one for one in OURS if one not in ONCE])
def test_our_services_come_back_and_survive_their_children(unit):
    service = Unit(unit)["Service"]
    assert service["Type"] == "notify"
    assert 0 < int(service["WatchdogSec"]) <= 60
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(EXIT_CONFIG)
    assert service["OOMPolicy"] == "continue"
    assert service["MemoryMax"]
    assert service["User"].startswith("fieldfleet")


def test_a_broker_that_is_filled_begins_anew_and_takes_no_more_than_its_half():
    service = Unit("mosquitto.conf")["Service"]
    assert service["MemoryMax"] == "50%"
    assert service["Restart"] == "on-failure"


def test_a_reload_of_the_broker_is_proven_by_the_site_and_a_timer_looks_at_it():
    """Debian's own unit sends a plain SIGHUP, after which mosquitto may be open to everybody; so does logrotate."""
    text = (UNITS / "mosquitto.conf").read_text()
    assert text.index("ExecReload=\n") < text.index("ExecReload=+/bin/sh -c")
    assert "exec /usr/bin/edge-server site reload" in Unit("mosquitto.conf")["Service"]["ExecReload"]
    check = Unit("fieldfleet-check.service")["Service"]
    assert (check["Type"], check["ExecStart"]) == ("oneshot", "/usr/bin/edge-server site check")
    assert set(check["CapabilityBoundingSet"].split()) == {"CAP_KILL", "CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE"}
    assert Unit("fieldfleet-check.timer")["Install"]["WantedBy"] == "timers.target"


def test_what_profiles_ask_for_is_in_the_rules():
    """Each group and line that a board's profile names for its sensors is one of the package's."""
    rules = (ROOT / "deploy/udev/60-fieldfleet.rules").read_text() + (ROOT / "deploy/udev/fieldfleet.conf").read_text()

    for path in Path(profiles).parent.glob("*.toml"):
        asked = tomllib.loads(path.read_text()).get("permissions", {})
        assert all(group in rules for group in asked.get("groups", [])), path
        assert all(line.replace("rapl:", "rapl*:") in rules for line in asked.get("tmpfiles", [])), path
        assert not asked.get("udev"), f"{path}: put its rules into deploy/udev as well"
