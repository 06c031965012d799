"""A gateway has its boards run a new version of the agent: commands, agents, certificates, signatures are all real.

Of a board's system stand-ins do the least: one for `systemctl`, and one for the path unit that starts root's half.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess  # noqa: TID251 - commands of boards
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from device_agent import __main__ as agent_command
from device_agent.config import load
from device_agent.upgrade import state_formats
from device_agent.upgrade.inputs import ARCHES
from device_agent.upgrade.record import FOLDER, WANTED, UpgradeRecord, read_upgrade
from device_agent.upgrade.trusted_roots import compute_pin
from edge_server.fleet import broker
from edge_server.gateway.initialise import SiteSettings, initialise
from tests.device_agent.upgrade import services
from tests.device_agent.upgrade.packages import package
from tests.edge_server.gateway.sites import LiveSite, make_site, now
from tests.edge_server.processes import ROOT, Ended, captured
from tests.machine import needs_mosquitto
from tests.naming import names_all
from tests.test_enrolment_system import agent_file, enrolling, join, typed

HANG_S = 180.0
OLD, GOOD, MUTE, ENDING = "0.4.0", "0.5.0", "0.6.0", "0.7.0"
BOARDS = ("pi-01", "pi-02")
UNLUCKY = "pi-02"
"""Its power is cut while it tries the good version."""
LONG, SHORT = "170s", "2s"
"""What a good version may take on a slow machine; what is waited for one that never connects."""
LOOK_S = 0.05
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.broker,
    needs_mosquitto,
    pytest.mark.skipif(platform.machine() not in ARCHES, reason="no packages are made for this processor"),
]


def tree_of(version: str) -> dict[str, bytes]:
    """Return the files of a version that runs this checkout's agent; one looks for its broker elsewhere, one ends.

    A board of which `doomed` says that its power is to be cut begins nothing before that.
    """
    file = "nowhere.toml" if version == MUTE else "agent.toml"
    run = f'FIELDFLEET_HOME="$1" exec {sys.executable} -m device_agent run --config "$3/{file}" 2>>"$3/agent.log"\n'
    waits = 'while [ -e "$3/doomed" ]; do sleep 0.1; done\n' if version == GOOD else ""
    script = f'echo {version} > "$3/running"\ncd {ROOT}\n{waits}{"exit 1" if version == ENDING else run}'
    python = "#!/bin/sh\nexit 0\n"  # it does start: tests of the updater have real ones, and such that do not
    formats = Path(state_formats.__file__).read_bytes()
    module = f"lib/python{PYTHON}/site-packages/device_agent/upgrade/state_formats.py"
    return {services.PROGRAM: script.encode(), "bin/python3": python.encode(), module: formats}


def put_package(folder: Path, version: str) -> Path:
    """Write a version's package for this machine; return its path."""
    needs = f"python3 (>= {PYTHON}~), adduser"
    control = f"Package: fieldfleet-agent\nArchitecture: {ARCHES[platform.machine()]}\nDepends: {needs}\n"
    path = folder / f"fieldfleet-agent_{version}.deb"
    path.write_bytes(package(version, tree_of(version), control=control))
    return path


@dataclass
class RealBoard:
    """A board in a folder, which joined its site, and on which dpkg laid the first version.

    Attributes:
        folder: Of all of it.
    """

    name: str
    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "opt"

    @property
    def config(self) -> Path:
        return self.folder / "agent.toml"

    def told(self) -> str:
        """Return what its agents and root's half said, for people who look for a fault."""
        return (self.folder / "agent.log").read_text()

    def lay(self) -> None:
        """Lay the first version, as dpkg does."""
        for name, data in tree_of(OLD).items():
            path = self.home / OLD / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755)
        for link in ("current", "updater"):
            (self.home / link).symlink_to(OLD)

    def trust(self) -> None:
        """Have it take what its site signs, and write the file by which nothing is connected."""
        roots = ("--home", self.home, "--roots", self.folder / "roots.pem")
        code, said, why = typed(agent_command.main, "upgrade", "trust", "--config", self.config, *roots)
        assert code == 0, why
        assert compute_pin((self.folder / "roots.pem").read_bytes()) in said
        (self.folder / "nowhere.toml").write_text(f"{self.config.read_text()}[broker]\nport = {broker.free_port()}\n")
        assert load(self.folder / "nowhere.toml").broker.port != load(self.config).broker.port

    def service(self) -> list[str]:
        """Return a command that understands the words of `systemctl`."""
        return [sys.executable, services.__file__, *map(str, (self.home, self.folder / "state", self.folder))]

    def tell_service(self, word: str) -> None:
        """Start or stop its agent, in a process of its own, which waits for no child of this one."""
        subprocess.run([*self.service(), word], cwd=ROOT, check=True, timeout=HANG_S)  # noqa: S603 - ours

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have its service run, and root's half begin whenever something else is wanted, while the block lasts."""
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=[over])
        self.tell_service("start")
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
            self.tell_service("stop")

    def _watch(self, over: threading.Event) -> None:
        """Be the path unit: the wish was written anew; and the end of the power of a board that is doomed."""
        path, seen = self.folder / "state" / FOLDER / WANTED, None
        while not over.wait(LOOK_S):
            found = path.stat().st_ino if path.exists() else None
            if found != seen and self._has_upgraded(over):
                seen = found

    def _has_upgraded(self, over: threading.Event) -> bool:
        """Run root's half to its end; tell whether it came to that, or the power was cut."""
        words = ("--home", self.home, "--config", self.config, "--roots", self.folder / "roots.pem")
        command = [sys.executable, "-m", "device_agent", "upgrade", "wanted", *map(str, words)]
        command += ["--systemctl", " ".join(self.service())]
        with (
            (self.folder / "agent.log").open("ab") as log,
            subprocess.Popen(command, cwd=ROOT, stderr=log, start_new_session=True) as root,  # noqa: S603 - ours
        ):
            while root.poll() is None and not over.wait(LOOK_S):
                if self.doomed.exists() and self.record().state == "trial" and self.runs() == GOOD:
                    os.killpg(root.pid, signal.SIGKILL)  # and the agent that it had started
                    self.tell_service("stop")
                    self.doomed.unlink()
            if over.is_set():
                root.kill()
        return root.returncode == 0

    @property
    def doomed(self) -> Path:
        return self.folder / "doomed"

    def record(self) -> UpgradeRecord:
        return read_upgrade(self.home)

    def runs(self) -> str:
        """Return the version whose agent has begun; empty while none has."""
        path = self.folder / "running"
        return path.read_text().strip() if path.exists() else ""

    def current(self) -> tuple[str, str]:
        """Return the version that is to run, and the one that runs."""
        return (self.home / "current").readlink().name, self.runs()


@dataclass
class Gateway:
    """A site with two boards: one more is one more agent to start, and shows nothing that these do not.

    Attributes:
        site: Its folder and its broker.
    """

    site: LiveSite
    boards: dict[str, RealBoard]

    def roll_out(self, version: str, soak: str) -> Ended:
        """Roll a version out, to a first board and then to all, by the command that people type."""
        words = ("--soak", soak, "--wait", LONG, "--waves", "100%", "--config", self.site.path / "server.toml")
        return captured("rollout", "start", "--agent", version, *words, limit_s=2 * HANG_S)

    def status(self) -> tuple[int, dict[str, Any]]:
        """Return the code of `rollout status`, and what it says."""
        shown = captured("rollout", "status", "--format", "json", "--config", self.site.path / "server.toml")
        return shown.code, json.loads(shown.out)

    def told(self) -> str:
        """Return what everybody said."""
        return "\n".join(f"{one.name}: {one.told()}" for one in self.boards.values())


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """Return a site whose boards joined it by tokens and run the first version; no word of anybody is refused."""
    site = make_site(tmp_path)
    initialise(site.folder, SiteSettings(addresses=("127.0.0.1",)), now())
    site.tell_refusals()
    boards = {name: RealBoard(name, tmp_path / name) for name in BOARDS}

    async def enrol() -> None:
        async with enrolling(site) as token:
            for board in boards.values():
                code, _, why = await join(agent_file(board.folder, "report_s = 1.0\n"), await token(board.name))
                assert code == 0, why

    with asyncio.Runner() as runner, ExitStack() as ending:
        runner.run(site.start())
        ending.callback(lambda: runner.run(site.stop()))
        runner.run(enrol())
        for board in boards.values():
            board.lay()
            board.trust()
            ending.enter_context(board.running())
        yield Gateway(site, boards)
    assert site.refusals() == []


def test_a_version_reaches_all_boards_and_bad_ones_go_back_and_stop_at_the_first(
    gateway: Gateway, tmp_path: Path
) -> None:
    """One is cut off from its power in the middle of its trial; of the bad ones one never connects, one ends."""
    debs = [put_package(tmp_path, version) for version in (GOOD, MUTE, ENDING)]
    added = captured("packages", "add", *debs, "--folder", gateway.site.path)
    assert added.code == 0, added.err
    boards = gateway.boards
    boards[UNLUCKY].doomed.touch()

    good = gateway.roll_out(GOOD, LONG)
    assert good.code == 0, (good, gateway.told())
    assert names_all(good.out, "finished", 2)
    assert [board.current() for board in boards.values()] == [(GOOD, GOOD)] * 2
    assert {(board.record().state, board.record().previous) for board in boards.values()} == {("committed", OLD)}
    assert {name for name, board in boards.items() if board.record().starts} == {UNLUCKY}, "watched anew"
    code, found = gateway.status()
    assert (code, found["state"], found["counts"], found["behind"]) == (0, "finished", {"committed": 2}, [])
    assert sorted((one["device"], one["serves"]) for one in found["boards"]) == [(name, 1) for name in BOARDS]
    assert [one["canary"] for one in found["boards"]] == [True, False]

    fails(gateway, MUTE, SHORT, "2 s")
    fails(gateway, ENDING, LONG, 3)


def fails(gateway: Gateway, version: str, soak: str, named: object) -> None:
    """Roll a bad version out: the first board goes back by itself and says why, and no other one hears of it."""
    bad = gateway.roll_out(version, soak)
    code, found = gateway.status()
    assert (bad.code, code, found["state"], found["counts"]) == (1, 1, "stopped", {"failed": 1}), (
        found,
        bad.err,
        gateway.told(),
    )
    [row] = found["boards"]
    name, why = row["device"], row["reason"]
    assert (row["state"], row["serves"], row["canary"]) == ("rolled-back", 1, True)
    assert names_all(why, version, named)
    assert f"{name}: {why}" in found["cause"]
    assert f"{name}: {why}" in " ".join((bad.out + bad.err).split())
    for board in gateway.boards.values():
        assert board.current() == (GOOD, GOOD)
        assert (board.record().to == version) == (board.name == name)
        assert bool(list((board.folder / "state" / FOLDER).glob(f"{version}.*"))) == (board.name == name)
