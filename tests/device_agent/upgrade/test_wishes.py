"""Upgrade requests from agent to root updater, in virtual time.

The service is one in memory: it runs the agent's part in rollouts in this process, and the new version's proof is there
at once. Who begins root's half looks at the wish as systemd's path unit does, and may miss it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from device_agent.exchange.agent_offers import SUPERSEDED, AgentOffers, InstalledVersion
from device_agent.exchange.download import Download
from device_agent.upgrade.agent_service import ServiceStatus
from device_agent.upgrade.inputs import UpgradeRequest
from device_agent.upgrade.proof import mark_busy
from device_agent.upgrade.record import FOLDER, PROOF, WANTED, HealthProof, UpgradeRecord, UpgradeTarget, read_upgrade
from device_agent.upgrade.updater import Updater
from shared.protocol import wire
from shared.protocol.inference.rollout import ModelStatus, Offer, Releases, Withdraw
from shared.protocol.packages import AGENT
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.transfer.receiver import Policy
from shared.transport.memory import MemoryTransport
from tests.device_agent.upgrade.packages import ARCH, PYTHON, UpgradeBoard
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time

SITE, DEVICE = "roof", "pi_0"
MINUTE, HOUR = 60.0, 3600.0


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@dataclass
class LiveBoard(UpgradeBoard):
    """A board whose agent hears offers; it is its own service.

    Attributes:
        deaf_until: When root's half begins to be told of wishes.
        written: When the agent wrote a wish.
        said: How the board stands, as the gateway knows it.
    """

    deaf_until: float = 0.0
    written: list[float] = field(default_factory=list)
    said: ModelStatus = field(default_factory=lambda: ModelStatus(name=""))
    transport: MemoryTransport = field(default_factory=MemoryTransport)
    living: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.service = self

    def start(self) -> None:
        """Run the version that `current` leads to; it proves itself."""
        version = (self.home / "current").readlink().name
        if nonce := self.record().nonce:
            (self.state / FOLDER / PROOF).write_bytes(msgspec.json.encode(HealthProof(version=version, nonce=nonce)))
        clock = asyncio.get_running_loop().time
        way = {"policy": Policy(16, 2.0, 1 << 30), "spool": "agent", "frames_on": "parts", "wants_on": "lacks"}
        download = Download(self.transport, SITE, DEVICE, self.state, inline, clock, **way)
        offers = AgentOffers(download, self.state, InstalledVersion(self.home, version, ARCH, PYTHON))
        self.living = asyncio.create_task(offers.run())

    def stop(self) -> None:
        if self.living:
            self.living.cancel()
        self.living = None

    def read_status(self) -> ServiceStatus:
        return ServiceStatus(self.living is not None)

    def record(self) -> UpgradeRecord:
        return read_upgrade(self.home)

    def upgrader(self) -> Updater:
        """Return root's half, as a new process would."""
        clock = asyncio.get_running_loop().time
        return Updater(replace(self.place(), find_start_error=lambda _: "", clock=clock, look_s=5.0), self)

    async def be_told(self) -> None:
        """Begin root's half once a wish was written, as `device-agent upgrade wanted` goes on with it."""
        path, seen, clock = self.state / FOLDER / WANTED, 0, asyncio.get_running_loop().time
        while True:
            found = path.stat().st_ino if path.exists() else 0
            if found != seen:
                self.written.append(clock())
                if clock() >= self.deaf_until:
                    await self.take_wishes()
            seen = found
            await asyncio.sleep(1.0)

    async def take_wishes(self) -> None:
        updater, done = self.upgrader(), None
        updater.resume()
        await updater.watch_trial()
        while (wanted := updater.agent.read_target()) not in (None, done):
            await updater.install(self.request(updater))
            done = wanted

    async def hear(self) -> None:
        async with self.transport.subscribe(topic(SITE, DEVICE, "agent")) as inbox:
            async for _, data in inbox:
                message = wire.decode(data)
                assert isinstance(message, Releases)
                self.said = message.models[0]

    async def tell(self, message: Offer | Withdraw) -> None:
        await self.transport.publish(topic(SITE, DEVICE, "upgrade"), wire.encode(message))

    async def offer(self, version: str, deployment: str = "d") -> None:
        """Offer a version whose package the board has fetched."""
        self.fetch(version)
        manifest = (self.state / FOLDER / f"{version}.json").read_bytes()
        word = {"deployment": deployment, "name": AGENT, "version": int(version), "manifest": manifest}
        await self.tell(Offer(**word, soak_s=120.0))

    async def withdraw(self, version: str, deployment: str = "d", *, back: bool = False) -> None:
        await self.tell(Withdraw(deployment=deployment, name=AGENT, version=int(version), back=back))

    def current_state(self) -> tuple[str, str]:
        return self.current(), self.record().state

    @asynccontextmanager
    async def alive(self):
        """Have agent, root's half and gateway at it while the block lasts."""
        self.start()
        tasks = [asyncio.create_task(self.be_told()), asyncio.create_task(self.hear())]
        try:
            await asyncio.sleep(1.0)
            yield
        finally:
            self.stop()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


@pytest.fixture
def live(tmp_path: Path) -> LiveBoard:
    return LiveBoard(tmp_path / "board")


async def test_a_wish_that_nobody_noticed_is_written_anew_ever_less_often_until_it_is_seen_to(live):
    live.deaf_until = HOUR
    async with live.alive():
        await live.offer("2")
        await asyncio.sleep(2 * HOUR)
        gaps = [round(later - sooner) for sooner, later in zip(live.written, live.written[1:], strict=False)]
        assert gaps == pytest.approx([30, 60, 120, 240, 480, 600, 600, 600, 600, 600], abs=3)
        assert live.current_state() == ("2", "committed")
        assert (live.said.committed, live.said.state) == (2, "committed")


async def test_a_wish_that_root_has_seen_to_is_written_once(live):
    async with live.alive():
        with mark_busy(live.state):
            await live.offer("2")
            await asyncio.sleep(HOUR / 2)
            assert live.current_state() == ("1", "staged")
            assert len(live.written) == 1
        await asyncio.sleep(MINUTE)
        assert live.current_state() == ("2", "committed")
        assert len(live.written) == 1


async def test_a_task_without_end_keeps_a_version_out_for_an_hour_and_not_for_ever(live):
    async with live.alive():
        with mark_busy(live.state):
            await live.offer("2")
            await asyncio.sleep(HOUR - MINUTE)
            assert live.record().state == "staged"
            await asyncio.sleep(2 * MINUTE)
            assert live.current_state() == ("1", "refused")
            assert names_all(live.said.reason, "3600 s", "`sudo device-agent upgrade install FILE.deb --force`")
        await asyncio.sleep(HOUR)
        assert live.current_state() == ("1", "refused"), "what was refused is not tried unless it is offered anew"
        await live.offer("2", "d2")
        await asyncio.sleep(MINUTE)
        assert live.current_state() == ("2", "committed")


@pytest.mark.parametrize("back", [False, True], ids=["aborted", "given up"])
@pytest.mark.parametrize("is_deaf", [False, True], ids=["root waits for a task", "root has not noticed"])
def test_a_version_that_was_withdrawn_before_its_trial_is_not_taken_later(live, virtually, back, is_deaf):
    """And however often that is said, the version that runs goes back to none."""

    async def routine():
        async with live.alive():
            await live.offer("2", "d1")
            await asyncio.sleep(MINUTE)
            assert live.current_state() == ("2", "committed")
            live.deaf_until = asyncio.get_running_loop().time() + 5 * MINUTE * is_deaf
            with mark_busy(live.state):
                await live.offer("3")
                await asyncio.sleep(MINUTE)
                assert live.record().state == ("committed" if is_deaf else "staged")
                for _ in range(3):
                    await live.withdraw("3", back=back)
                    await asyncio.sleep(20)
            await asyncio.sleep(HOUR)
            assert live.current_state() == ("2", "committed")
            assert (live.record().to, live.record().previous, live.said.committed) == ("2", "1", 2)
            await live.offer("3", "d3")
            await asyncio.sleep(MINUTE)
            assert live.current_state() == ("3", "committed"), "another rollout of it is not withdrawn"
            await live.withdraw("3", "d3", back=False)
            await live.withdraw("3", "d", back=True)
            await asyncio.sleep(HOUR)
            assert live.current_state() == ("3", "committed"), "what boards have they keep"
            await live.withdraw("3", "d3", back=True)
            await asyncio.sleep(MINUTE)
            assert live.current_state() == ("2", "rolled-back")

    virtually(routine())


async def test_what_somebody_installs_by_hand_is_not_undone_by_an_older_wish_at_the_next_boot(live):
    """The wish for the version before lies there still, and looks like an order to go back."""
    async with live.alive():
        await live.offer("2")
        await asyncio.sleep(MINUTE)
        live.fetch("3")
        updater, manifest, package = live.upgrader(), live.state / FOLDER / "3.json", live.state / FOLDER / "3.deb"
        updater.resume()
        by_hand = UpgradeRequest(
            UpgradeTarget(version="3"), manifest.read_bytes, lambda _size: package.read_bytes(), by_hand=True
        )
        assert (await updater.install(by_hand)).state == "committed"
        live.reboot()
        await live.take_wishes()
        await asyncio.sleep(MINUTE)
        assert live.current_state() == ("3", "committed")
        await live.offer("2")
        await asyncio.sleep(MINUTE)
        assert (live.current(), live.said.state, live.said.reason) == ("3", "refused", SUPERSEDED)
        await live.offer("2", "another")
        await asyncio.sleep(MINUTE)
        assert live.current_state() == ("2", "rolled-back"), "who orders it anew gets it: it is the one before"
