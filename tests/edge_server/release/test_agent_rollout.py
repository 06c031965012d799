"""Rollouts of agent versions in virtual time, with real packages."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from device_agent.exchange.agent_offers import CANNOT_UPGRADE, AgentOffers, InstalledVersion
from device_agent.exchange.download import Download
from device_agent.upgrade.record import (
    FOLDER,
    RECORD,
    WANTED,
    UpgradeRecord,
    UpgradeTarget,
    read_upgrade,
    write_upgrade,
)
from device_agent.upgrade.transitions import apply_event, begin_upgrade
from edge_server.gateway.initialise import SiteSettings as WantedSite
from edge_server.gateway.initialise import initialise
from edge_server.gateway.packages.store import add_packages
from edge_server.gateway.site_folder import SiteFolder
from edge_server.journal.rollouts.file import RolloutPlan
from edge_server.journal.rollouts.state import summarise
from edge_server.release.rollout.agents import find_agent
from edge_server.release.rollout.engine import RolloutEngine
from edge_server.release.rollout.link import RolloutLink, RolloutOptions
from edge_server.release.rollout.orders import begin_rollout, give_order
from edge_server.release.rollout.tables import heading_lines
from shared.errors import FieldFleetError
from shared.protocol import wire
from shared.protocol.inference.release import sha256_of
from shared.protocol.messages import Report, Status
from shared.protocol.packages import decode_signed_manifest, find_build, verify
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.transfer.receiver import Policy
from shared.transport.memory import MemoryTransport
from tests.edge_server.gateway.sites import put_deb
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time

SITE = "roof"
TERMS = RolloutPlan(deployment="", release="", sha256="", soak_s=120.0, canary=1, waves=(0.25, 0.5, 1.0), ahead=False)


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@dataclass
class UpgradingBoard:
    """A board that can be switched on and off.

    Attributes:
        transport: Its way to the broker.
        root: What root trusts there.
        bad: Versions that do not prove themselves here.
        upgrades: Whether there is anybody who installs.
    """

    device: str
    transport: MemoryTransport
    folder: Path
    root: bytes
    arch: str = "arm64"
    bad: frozenset[str] = frozenset()
    upgrades: bool = True
    version: str = "0.4.0"
    session: int = 0
    trials: list[str] = field(default_factory=list)
    living: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None

    @property
    def home(self) -> Path:
        return self.folder / "opt"

    def record(self) -> UpgradeRecord:
        return read_upgrade(self.home)

    async def switch_on(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        await self.start_agent()
        if self.upgrades:
            self.watching = asyncio.create_task(self.be_root())

    async def start_agent(self) -> None:
        await self.stop(self.living)
        self.session += 1
        await self.say(online=True)
        report = Report(device=self.device, at=float(self.session), board="pi-4", instance=f"i{self.session}")
        await self.transport.publish(topic(SITE, self.device, "report"), wire.encode(report), retain=True)
        download = Download(
            *(self.transport, SITE, self.device, self.folder / "state", inline, asyncio.get_running_loop().time),
            policy=Policy(16, 2.0, 1 << 30),
            spool="agent",
            frames_on="parts",
            wants_on="lacks",
        )
        own = InstalledVersion(self.home if self.upgrades else None, self.version, self.arch, "3.11")
        offers = AgentOffers(download, self.folder / "state", own, f"i{self.session}")
        self.living = asyncio.create_task(offers.run())

    async def say(self, *, online: bool) -> None:
        status = Status(device=self.device, session=self.session, instance=f"i{self.session}", online=online)
        await self.transport.publish(topic(SITE, self.device, "status"), wire.encode(status), retain=True)

    async def switch_off(self) -> None:
        for task in (self.watching, self.living):
            await self.stop(task)
        self.watching = self.living = None
        await self.say(online=False)

    async def stop(self, task: asyncio.Task[None] | None) -> None:
        if task:
            task.cancel()
            await asyncio.wait({task})

    async def be_root(self) -> None:
        """Take what is wanted, as the service of upgrades does; a trial that a power cut ended goes on."""
        if self.record().state == "trial":
            await self.prove(self.record())
        while True:
            path = self.folder / "state" / FOLDER / WANTED
            if path.exists():
                wanted, record = msgspec.json.decode(path.read_bytes(), type=UpgradeTarget), self.record()
                if wanted.version == record.previous and record.state == "committed":
                    self.version = record.previous
                    write_upgrade(self.home, apply_event(record, "back", "taken back"))
                    await self.start_agent()
                elif not record.matches_target(wanted) and wanted.version != self.version:
                    await self.take(wanted)
            await asyncio.sleep(1.0)

    async def take(self, wanted: UpgradeTarget) -> None:
        record, folder = begin_upgrade(self.record(), wanted, self.version), self.folder / "state" / FOLDER
        try:
            manifest = verify(decode_signed_manifest((folder / f"{wanted.version}.json").read_bytes()), self.root)
            build = find_build(manifest, self.arch, "3.11")
            assert sha256_of((folder / f"{wanted.version}.deb").read_bytes()) == build.sha256
        except FieldFleetError as error:
            write_upgrade(self.home, apply_event(record, "refused", str(error)))
            return
        serials = {**record.serials, manifest.version: manifest.serial}
        for event in ("fetched", "verified", "staged", "switched"):
            record = apply_event(record, event, serials=serials)
        write_upgrade(self.home, record)
        self.version = wanted.version
        self.trials.append(wanted.version)
        await self.start_agent()
        await self.prove(record)

    async def prove(self, record: UpgradeRecord) -> None:
        await asyncio.sleep(record.probation_s / 2)
        if record.to in self.bad:
            self.version = record.from_
            write_upgrade(self.home, apply_event(record, "worse", "it did not connect within its probation"))
        else:
            write_upgrade(self.home, apply_event(record, "passed"))
        await self.start_agent()


class Fleet:
    """A gateway's site with two versions of the agent, and boards."""

    def __init__(self, folder: Path, count: int = 8, **bad: frozenset[str]) -> None:
        self.data_dir, self.transport = folder / "runs", MemoryTransport()
        self.site = SiteFolder(folder / "site")
        initialise(self.site, WantedSite(SITE, ("gateway.local",)), datetime(2026, 11, 23, tzinfo=UTC))
        for version in ("0.4.0", "0.5.0"):
            add_packages(self.site, [put_deb(folder / "debs", version, filling=os.urandom(60_000))])
        root = self.site.ca("root.crt").read_bytes()
        names = [f"pi_{number}" for number in range(count)]
        self.boards = {
            name: UpgradingBoard(name, self.transport, folder / name, root, bad=bad.get(name, frozenset()))
            for name in names
        }

    @asynccontextmanager
    async def awake(self, *, without: tuple[str, ...] = ()):
        try:
            for name, board in self.boards.items():
                if name not in without:
                    await board.switch_on()
            yield
        finally:
            for board in self.boards.values():
                await board.switch_off()

    def begin(self, version: str = "0.5.0", **terms: object):
        return begin_rollout(
            self.data_dir, find_agent(self.site.path, version), msgspec.structs.replace(TERMS, **terms)
        )

    async def drive(self, known, wait=lambda _why: None):
        stored = find_agent(self.site.path, known.state.plan.release)
        clock = asyncio.get_running_loop().time
        link = RolloutLink(SITE, self.transport, clock, inline, stored, 4096, 1.0)
        async with asyncio.timeout(36_000):
            await RolloutEngine(known, link, RolloutOptions(on_wait=wait)).run()
        return known.state

    def versions(self) -> list[str]:
        return [board.version for board in self.boards.values()]


async def test_a_version_of_the_agent_goes_to_all_wave_by_wave_and_one_that_is_away_does_not_hold_it_up(tmp_path):
    fleet = Fleet(tmp_path)
    async with fleet.awake():  # so that it is known
        await asyncio.sleep(5.0)
    async with fleet.awake(without=("pi_7",)):
        state = await fleet.drive(fleet.begin())
        assert (state.outcome, state.behind) == ("finished", ("pi_7",))
        assert [len(wave) for wave in state.waves] == [1, 1, 2, 3]
        assert fleet.versions() == ["0.5.0"] * 7 + ["0.4.0"]
        assert all(board.trials == ["0.5.0"] for board in list(fleet.boards.values())[:7])
        told = summarise(state)
        assert told.counts == {"committed": 7}
        assert {row.serves for row in told.boards} == {2}
        assert told.plan.release == "fieldfleet-agent/2"
        again = await fleet.drive(fleet.begin())
        assert (again.outcome, again.sent) == ("finished", 0), "all that are there have it: nothing is sent"


async def test_a_board_that_goes_back_stops_it_and_the_others_keep_what_they_have(tmp_path):
    fleet = Fleet(tmp_path, pi_2=frozenset({"0.5.0"}))
    async with fleet.awake():
        state = await fleet.drive(fleet.begin())
        assert state.outcome == "stopped"
        assert names_all(state.cause, "pi_2")
        assert fleet.versions() == ["0.5.0"] * 2 + ["0.4.0"] + ["0.5.0"] + ["0.4.0"] * 4
        assert fleet.boards["pi_2"].record().state == "rolled-back"
        assert all(not board.trials for board in list(fleet.boards.values())[4:])


async def test_it_is_taken_back_from_those_that_have_it(tmp_path):
    fleet = Fleet(tmp_path, 3)
    async with fleet.awake():
        known = fleet.begin(waves=(1.0,))
        await fleet.drive(known)
        assert fleet.versions() == ["0.5.0"] * 3
        give_order(known, "back")
        state = await fleet.drive(known)
        assert state.outcome == "taken-back"
        assert fleet.versions() == ["0.4.0"] * 3


async def test_who_drives_it_may_be_killed_and_boards_lose_power(tmp_path):
    fleet = Fleet(tmp_path, 3)
    async with fleet.awake():
        known = fleet.begin(waves=(1.0,), canary=0)
        for seconds in (1.0, 3.0, 20.0, 70.0):
            driving = asyncio.create_task(fleet.drive(known))
            await asyncio.sleep(seconds)
            driving.cancel()
            await asyncio.wait({driving})
            board = fleet.boards["pi_1"]
            await board.switch_off()
            await board.switch_on()
        assert (await fleet.drive(known)).outcome == "finished"
        assert fleet.versions() == ["0.5.0"] * 3
        assert all(board.trials == ["0.5.0"] for board in fleet.boards.values()), "each tried it out once"


async def test_a_board_that_its_trial_takes_away_for_good_stops_it_and_the_others_go_on_without_it(tmp_path):
    fleet = Fleet(tmp_path, 3)
    first, waits = fleet.boards["pi_0"], list[str]()
    async with fleet.awake():
        known = fleet.begin(waves=(1.0,))
        driving, began = asyncio.create_task(fleet.drive(known, waits.append)), asyncio.get_running_loop().time()
        while not first.trials:  # noqa: ASYNC110 - virtual seconds
            await asyncio.sleep(0.1)
        await first.switch_off()
        state = await driving
        assert asyncio.get_running_loop().time() - began == pytest.approx(3 * 120 + 180, abs=30)
        assert state.outcome == "stopped"
        assert names_all(state.cause, "pi_0", "540 s", "edge-server rollout resume")
        assert re.search(r"\bpi_0\b.* 2\S+Z", waits[-1]), waits
        assert fleet.versions() == ["0.5.0", "0.4.0", "0.4.0"]
        give_order(known, "resume")
        state = await fleet.drive(known)
        assert (state.outcome, state.behind) == ("finished", ())
        assert fleet.versions() == ["0.5.0"] * 3
        await first.switch_on()
        await asyncio.sleep(100)
        again = await fleet.drive(fleet.begin())
        assert (again.outcome, summarise(again).counts) == ("finished", {}), "it made it after all"


async def test_a_version_that_is_there_for_no_board_stops_at_the_first_which_says_what_to_add(tmp_path):
    fleet = Fleet(tmp_path, 3)
    for board in fleet.boards.values():
        board.arch = "amd64"
    async with fleet.awake():
        known = fleet.begin()
        state = await fleet.drive(known)
        assert (state.outcome, list(state.offered_boards)) == ("stopped", ["pi_0"])
        shown = "\n".join(heading_lines(state))
        assert names_all(
            shown, "pi_0", "fieldfleet-agent", "0.5.0", "arm64", "3.11", "amd64", "edge-server packages add"
        )
        assert state.sent == 0


async def test_boards_that_cannot_take_it_say_why(tmp_path):
    fleet = Fleet(tmp_path, 3)
    fleet.boards["pi_0"].upgrades = False
    fleet.boards["pi_1"].arch = "amd64"
    fleet.boards["pi_2"].root = b""
    async with fleet.awake():
        state = await fleet.drive(fleet.begin(waves=(1.0,), canary=0, max_failures=3))
        assert state.outcome == "stopped"
        assert state.reason("pi_0") == CANNOT_UPGRADE
        assert names_all(state.reason("pi_1"), "amd64", "3.11")
        assert state.reason("pi_2") not in ("", CANNOT_UPGRADE, state.reason("pi_1"))
        assert not (fleet.boards["pi_1"].home / RECORD).exists()
