"""Agent upgrade of a board with real command, agents, broker and signatures."""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess  # noqa: TID251 - the updater is killed
import sys
import time
from pathlib import Path

import pytest

from device_agent.upgrade.inputs import ARCHES
from device_agent.upgrade.record import FOLDER, read_upgrade
from edge_server.fleet import broker
from shared.protocol.packages import decode_manifest, decode_signed_manifest
from tests.device_agent.agent_side import write_config
from tests.device_agent.upgrade import services
from tests.device_agent.upgrade.packages import UpgradeBoard, manifest_of, package
from tests.machine import free_port
from tests.naming import names_all

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0
pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(broker.find_mosquitto() is None, reason="mosquitto is not installed"),
    pytest.mark.skipif(platform.machine() not in ARCHES, reason="no packages are made for this processor"),
]


def real_tree(version: str, config: Path) -> dict[str, bytes]:
    """Return the files of a version that runs this checkout's agent."""
    run = f"exec {sys.executable} -m device_agent run --config {config}\n"
    script = f"echo {version} > $3/running\ncd {ROOT}\nFIELDFLEET_HOME=$1 {run}"
    python = f'#!/bin/sh\nshift\ncd {ROOT}\nexec {sys.executable} "$@"\n'  # -I would not find this checkout
    return {services.PROGRAM: script.encode(), "bin/python3": python.encode()}


class RealBoard(UpgradeBoard):
    """A board that upgrades itself by the command."""

    def command(self, *words: str) -> list[str]:
        """Return a command line of `device-agent upgrade`."""
        service = f"{sys.executable} {services.__file__} {self.home} {self.state} {self.kept}"
        told = ["--home", str(self.home), "--config", str(self.folder / "agent.toml")]
        told += ["--roots", str(self.folder / "roots.pem")]
        told += ["--systemctl", service] if words[0] != "status" else []
        return [sys.executable, "-m", "device_agent", "upgrade", *words, *told]

    def upgrade(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one to its end."""
        return subprocess.run(  # noqa: S603 - ours
            self.command(*words), cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )

    def fetch_real(self, version: str, config: Path) -> None:
        """Have the agent fetch a package for this machine."""
        self.trees[version] = real_tree(version, config)
        data = package(version, self.trees[version])
        [build] = decode_manifest(decode_signed_manifest(manifest_of(version, data)).manifest).builds
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        ours = type(build)(
            file=build.file, arch=ARCHES[platform.machine()], python=python, sha256=build.sha256, size=build.size
        )
        (self.state / FOLDER / f"{version}.deb").write_bytes(data)
        (self.state / FOLDER / f"{version}.json").write_bytes(manifest_of(version, data, builds=(ours,)))

    def wait_for(self, state: str) -> None:
        """Wait until the record says so."""
        limit = time.monotonic() + LIMIT_S
        while read_upgrade(self.home).state != state:
            assert time.monotonic() < limit, read_upgrade(self.home)
            time.sleep(0.01)  # noqa: TID251 - in a thread


@pytest.fixture
def board(tmp_path):
    """Return a board on which a version runs that says nothing."""
    made = RealBoard(tmp_path / "board")
    made.service.start()
    yield made
    made.service.stop()


async def test_a_version_is_cut_off_in_its_trial_goes_on_and_is_kept_and_one_that_never_connects_is_not(board):
    """And what the command says of it."""

    async def story(port: int) -> None:
        config = write_config(board.folder, port)
        write_config(board.folder / "nowhere", free_port())
        await asyncio.to_thread(upgrade_and_fail, board, config, board.folder / "nowhere/agent.toml")

    for name in ("broker", "nowhere"):
        (board.folder / name).mkdir()
    async with broker.run_private_broker(board.folder / "broker") as running:
        await story(running.port)


def upgrade_and_fail(board: RealBoard, good: Path, nowhere: Path) -> None:
    text = nowhere.read_text().replace(f"{nowhere.parent}/state", f"{board.state}")
    nowhere.write_text(text)
    board.fetch_real("2", good)
    board.want("2")
    first = subprocess.Popen(board.command("wanted"), cwd=ROOT, stderr=subprocess.DEVNULL)  # noqa: S603
    board.wait_for("trial")
    first.kill()
    first.wait(LIMIT_S)
    board.service.kill()
    done = board.upgrade("wanted")
    assert done.returncode == 0, done.stderr
    record = read_upgrade(board.home)
    assert (record.state, record.to, record.from_) == ("committed", "2", "1"), record
    assert (board.current(), board.service.running()) == ("2", "2")

    board.fetch_real("3", nowhere)
    board.want("3", probation_s=4.0)
    assert board.upgrade("wanted").returncode == 0
    record = read_upgrade(board.home)
    assert (record.state, names_all(record.reason, 3, "4 s")) == ("rolled-back", True), record
    assert (board.current(), board.service.running()) == ("2", "2")
    said = json.loads(board.upgrade("status", "--format", "json").stdout)
    assert (said["current"], said["state"], said["to"], said["from"], len(said["trusts"])) == (
        *("2", "rolled-back", "3", "2"),
        1,
    )
    assert names_all(board.upgrade("status").stdout, 2, 3, "rolled-back", record.reason)
