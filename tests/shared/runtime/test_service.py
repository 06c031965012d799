"""systemd notifications as real datagrams, in virtual time."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from shared.runtime.service import ALIVE, READY, STOPPING, Supervisor, find_supervisor, notify_supervisor
from shared.runtime.support import units

pytestmark = pytest.mark.virtual_time

NUMBERS = count()


@pytest.fixture(params=["path", "abstract"])
def ear(request, tmp_path):
    """Return a socket as systemd listens at, and what the environment says of it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@fieldfleet-test-{os.getpid()}-{next(NUMBERS)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1))
        listening.setblocking(False)
        yield listening, name


def heard(ear: socket.socket) -> list[bytes]:
    """Return all that has come."""
    said = []
    with suppress(BlockingIOError):
        while True:
            said.append(ear.recv(4096))
    return said


async def test_it_has_begun_goes_on_and_stops(ear):
    listening, address = ear
    said = []
    async with notify_supervisor(find_supervisor({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"})):
        await asyncio.sleep(0)
        said.extend(heard(listening))
        for _ in range(100):
            await asyncio.sleep(30)
            said.extend(heard(listening))
    assert said[:2] == [READY, ALIVE]
    assert 100 <= said.count(ALIVE) <= 102
    assert heard(listening) == [STOPPING]


async def test_a_loop_that_hangs_does_not_ping(ear):
    """The pings are of the loop that does the work: a callback that never returns keeps them back."""
    listening, address = ear
    async with notify_supervisor(find_supervisor({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"})):
        await asyncio.sleep(0)
        heard(listening)
        sum(range(100_000))  # longer than the watchdog's microsecond
        assert heard(listening) == []
        await asyncio.sleep(1e-6)
        assert ALIVE in heard(listening)


def test_an_error_leaves_as_itself_and_the_stop_is_told(ear, virtually):
    listening, address = ear

    async def story() -> None:
        async with notify_supervisor(find_supervisor({"NOTIFY_SOCKET": address})):
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        virtually(story())
    assert heard(listening) == [READY, STOPPING]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, Supervisor()),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, Supervisor()),  # of a virtual machine as a whole
        ({"NOTIFY_SOCKET": "/run/x"}, Supervisor("/run/x")),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "2000000"}, Supervisor("\0x", 2.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, Supervisor("/x", 2.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, Supervisor("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, Supervisor("/x")),
    ],
)
def test_who_wants_to_know_is_found_and_hidden_from_children(said, expected):
    there = {"HOME": "/root", **said}
    assert find_supervisor(there) == expected
    assert there == {"HOME": "/root"}


async def test_without_systemd_nothing_is_told(monkeypatch, caplog):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    async with notify_supervisor():
        await asyncio.sleep(3600)
    assert not caplog.records


async def test_a_socket_that_is_gone_is_logged_and_nothing_else(tmp_path, caplog):
    async with notify_supervisor(Supervisor(str(tmp_path / "gone"))):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert Path(tmp_path / "gone").exists() is False


def test_services_are_started_where_systemd_runs_and_what_it_says_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "RUNNING", tmp_path)
    assert units.can_start_services() == (os.geteuid() == 0)
    monkeypatch.setattr(units, "RUNNING", tmp_path / "none")
    assert not units.can_start_services()
    monkeypatch.setattr(units, "SYSTEMCTL", str(tmp_path / "systemctl"))
    assert "No such file" in units.restart("a")
    (tmp_path / "systemctl").write_text(f"""#!/bin/sh
echo "$*" >> {tmp_path}/asked
case $3 in b) echo "Unit b.service
  not found." >&2; exit 5 ;; c) exit 4 ;; esac
""")
    (tmp_path / "systemctl").chmod(0o755)
    assert units.restart("a", "d", verb="try-restart") == ""
    assert units.restart("b") == "Unit b.service not found."
    assert "code 4" in units.restart("c")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [f"--no-ask-password {told}" for told in ("try-restart a d", "restart b", "restart c")]


def test_systemd_is_asked_how_services_are(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SYSTEMCTL", str(tmp_path / "systemctl"))
    assert asyncio.run(units.query_states("a", "b")) == {"a": "", "b": ""}
    (tmp_path / "systemctl").write_text("""#!/bin/sh
case "$*" in *" is-active a b") printf 'active\\nfailed\\n'; exit 3 ;; *) echo lost ;; esac
""")
    (tmp_path / "systemctl").chmod(0o755)
    assert asyncio.run(units.query_states("a", "b")) == {"a": "active", "b": "failed"}
    assert asyncio.run(units.query_states("a", "c")) == {"a": "", "c": ""}
