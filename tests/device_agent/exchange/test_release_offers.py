"""Faults of a rollout at a board: offer, payload, disk, absent server."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from device_agent.exchange.release_parts import MissingParts, runtime_refusal
from edge_server.release.rollout.bundle_distributor import open_bundle
from edge_server.release.store import StoredRelease
from shared.errors import CorruptFile, WireError
from shared.protocol import wire
from shared.protocol.inference.bundle import Lacking, parse_lacks
from shared.protocol.inference.release import ReleaseManifest
from shared.protocol.inference.rollout import Bundle, Lacks, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.messages import Transfer, Want
from shared.protocol.topics import topic
from shared.transport.memory import MemoryTransport
from tests.edge_server.release.boards import SITE, FieldBoard, make_release

pytestmark = pytest.mark.virtual_time

DRAW = random.Random(11)
LAYERS = {f"layer{number}": DRAW.randbytes(9_000) for number in range(3)}
DEVICE = "pi-1"


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch):
    """Nobody cuts the power of this machine."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def stored(tmp_path) -> StoredRelease:
    return make_release(tmp_path / "runs", LAYERS)


def offer(stored: StoredRelease, **changes: object) -> Offer:
    """Return the offer of a release."""
    manifest = stored.path(stored.sha256).read_bytes()
    told = {"deployment": "0001-net-1-aaaa", "name": "net", "version": 1, "manifest": manifest, "soak_s": 0.0}
    return Offer(**{**told, **changes})


class Gateway:
    """What a server says, by hand; it answers wishes for parts as long as it is told to.

    Attributes:
        said: The last word of the board on its models.
        lacks: What it asked for, in order.
        damage: Changes a bundle's bytes before it is sent.
    """

    def __init__(self, stored: StoredRelease, folder: Path) -> None:
        self.transport, self.stored = MemoryTransport(), stored
        self.board = FieldBoard(DEVICE, self.transport, folder / DEVICE)
        self.said: tuple[ModelStatus, ...] = ()
        self.states: list[str] = []
        self.lacks: list[Lacks] = []
        self.answers = True
        self.damage: Callable[[bytes], bytes] = lambda data: data
        self._sender = None

    async def say(self, message: Offer | Withdraw | Bundle) -> None:
        await self.transport.publish(topic(SITE, DEVICE, "offer"), wire.encode(message))

    async def run(self) -> None:
        """Hear the board."""
        names = (topic(SITE, DEVICE, channel) for channel in ("lacks", "release"))
        async with self.transport.subscribe(*names) as inbox:
            async for _, data in inbox:
                match wire.decode(data):
                    case Releases() as told:
                        self.said = told.models
                        self.states += [one.state for one in told.models]
                    case Lacks() as told:
                        self.lacks.append(told)
                        if self.answers:
                            await self._offer_bundle(told)
                    case Want() as want if self._sender and want.digest == self._sender.transfer.digest:
                        for frame in self._sender.answer(want, self.transport.max_payload_bytes):
                            await self.transport.publish(topic(SITE, DEVICE, "parts"), frame)

    async def _offer_bundle(self, told: Lacks) -> None:
        whole = open_bundle(self.stored, parse_lacks(told), 4096)
        data = self.damage(b"".join(whole.source.read(0, 1 << 24)))
        self._sender = type(whole).of_parts([memoryview(data)], 4096)
        await self.say(Bundle(deployment=told.deployment, params=self._sender.transfer))

    def status(self) -> ModelStatus:
        [one] = self.said
        return one


@asynccontextmanager
async def living(gateway: Gateway) -> AsyncIterator[None]:
    """Let board and gateway live."""
    hearing = asyncio.create_task(gateway.run())
    await gateway.board.switch_on()
    await asyncio.sleep(0.1)
    try:
        yield
    finally:
        await gateway.board.switch_off()
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"manifest": b"{}"}, "manifest"),
        ({"manifest": b"\xff\x00"}, "manifest"),
        ({"manifest": b'{"format": 99}'}, "format 99"),
        ({"version": 7}, "net/7"),
        ({"soak_s": -1.0}, "soak_s"),
    ],
)
async def test_what_cannot_be_taken_is_refused_with_its_cause_before_anything_is_fetched(
    tmp_path, stored, changes, reason
):
    gateway = Gateway(stored, tmp_path)
    async with living(gateway):
        await gateway.say(offer(stored, **changes))
        await asyncio.sleep(5)
        assert (gateway.status().state, gateway.status().deployment) == ("refused", "0001-net-1-aaaa")
        assert reason in gateway.status().reason
        assert gateway.lacks == []
        await gateway.say(offer(stored, deployment="0002-net-1-bbbb"))
        await asyncio.sleep(60)
        assert gateway.status().state == "committed"


@pytest.mark.parametrize("name", ["../../escape", "/any/path", "a\nb", "..", "a\x00b", "model."])
@pytest.mark.parametrize("kind", ["Offer", "Ahead"])
async def test_a_manifest_that_names_a_path_writes_nothing_anywhere(tmp_path, stored, caplog, name, kind):
    """Both name it alike, as one gateway with a signed certificate may: nothing is made, and the board goes on."""
    home = tmp_path / "deep" / "in" / "a" / "tree"
    home.mkdir(parents=True)
    gateway = Gateway(stored, home)
    told = json.loads(stored.path(stored.sha256).read_bytes()) | {"name": name}
    message = {"type": kind, "deployment": "0001-x", "name": name, "version": 1, "manifest": json.dumps(told).encode()}
    body = wire.encode(Want(digest=b"", frame_bytes=1, ranges=[]))[:3] + msgspec.msgpack.encode(
        {**message, "soak_s": 0.0}
    )
    there = {path for path in tmp_path.rglob("*") if home not in path.parents}
    async with living(gateway):
        await gateway.transport.publish(topic(SITE, DEVICE, "offer"), body)
        await asyncio.sleep(60)
        assert gateway.lacks == []
        assert {path for path in tmp_path.rglob("*") if home not in path.parents} == there
        assert not any("escape" in path.name for path in home.rglob("*"))
        await gateway.say(offer(stored))
        await asyncio.sleep(60)
        assert gateway.status().state == "committed"
    assert not Path("/any/path").exists()
    assert all("\n" not in record.getMessage() for record in caplog.records)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_noise_on_its_topic_does_not_end_a_board(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    async with living(gateway):
        for noise in (b"", b"FM", b"\xff" * 100, wire.encode(Want(digest=b"", frame_bytes=1, ranges=[]))):
            await gateway.transport.publish(topic(SITE, DEVICE, "offer"), noise)
        bundle = Bundle(deployment="x", params=Transfer(digest=bytes(16), size=1 << 40, frame_bytes=1024), shared=True)
        await gateway.say(bundle)
        await gateway.say(offer(stored))
        await asyncio.sleep(60)
        assert gateway.status().state == "committed"


async def test_an_answer_that_is_lost_is_asked_for_again(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    gateway.answers = False
    async with living(gateway):
        await gateway.say(offer(stored))
        await asyncio.sleep(100)
        assert 4 <= len(gateway.lacks) <= 8, "further and further apart"
        gateway.answers = True
        await asyncio.sleep(100)
        assert gateway.status().state == "committed"


async def test_a_payload_with_the_right_digest_and_the_wrong_parts_is_refused_after_some_attempts(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    gateway.damage = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    async with living(gateway):
        await gateway.say(offer(stored))
        await asyncio.sleep(300)
        assert gateway.status().state == "refused"
        assert len(gateway.lacks) == 3
        assert gateway.board.record().committed == 0


async def test_a_full_disk_refuses_it_and_leaves_what_is_served(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    async with living(gateway):
        await gateway.say(offer(stored))
        await asyncio.sleep(60)
        assert gateway.status().committed == 1
        newer = make_release(tmp_path / "runs", {**LAYERS, "layer1": DRAW.randbytes(9_000)})
        gateway.stored = newer
        gateway.damage = lambda data: data
        manifest = newer.path(newer.sha256).read_bytes()
        store = gateway.board.store
        spool = gateway.board.folder / "release"
        spool.unlink(missing_ok=True)
        spool.mkdir()  # a disk that does not take what comes, whoever runs this test
        await gateway.say(offer(newer, deployment="0002", version=2, manifest=manifest))
        await asyncio.sleep(60)
        assert gateway.status().state == "refused"
        assert (gateway.status().committed, store.record("net").committed) == (1, 1)


async def test_a_disk_that_is_full_refuses_it_and_takes_it_when_there_is_room(disk, stored):
    """A real one: neither the note of the offer nor its parts find room, or the parts alone do not."""
    gateway = Gateway(stored, disk.path)
    async with living(gateway):
        await gateway.say(offer(stored))
        await asyncio.sleep(60)
        assert gateway.status().committed == 1
        newer = make_release(disk.path.parent / "runs", {**LAYERS, "layer1": DRAW.randbytes(9_000)})
        gateway.stored, manifest = newer, newer.path(newer.sha256).read_bytes()
        for number, left in enumerate((0, 20_000)):
            disk.fill(left)
            await gateway.say(offer(newer, deployment=f"000{number}", version=2, manifest=manifest))
            await asyncio.sleep(60)
            assert (gateway.status().state, gateway.status().committed) == ("refused", 1)
            assert os.strerror(errno.ENOSPC) in gateway.status().reason, gateway.status().reason
            assert gateway.board.record().committed == 1
        disk.make_room()
        await gateway.say(offer(newer, deployment="0009", version=2, manifest=manifest))
        await asyncio.sleep(60)
        assert gateway.status().committed == 2


async def test_withdrawn_in_the_middle_of_a_download_nothing_is_taken(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    gateway.answers = False
    async with living(gateway):
        await gateway.say(offer(stored))
        await asyncio.sleep(3)
        await gateway.say(Withdraw(deployment="0001-net-1-aaaa", name="net", version=1))
        await asyncio.sleep(1)
        assert gateway.status().state == "superseded"
        gateway.answers = True
        await asyncio.sleep(100)
        assert gateway.board.record().committed == 0
        assert len(gateway.lacks) == 1


async def test_a_board_that_loses_power_in_the_middle_goes_on_when_it_is_offered_again(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    gateway.answers = False
    async with living(gateway):
        await gateway.say(offer(stored))
        await asyncio.sleep(3)
        await gateway.board.switch_off()
        await gateway.board.switch_on()
        gateway.answers = True
        await asyncio.sleep(1)
        await gateway.say(offer(stored))
        await asyncio.sleep(60)
        assert gateway.status().state == "committed"


async def test_states_are_told_in_the_order_in_which_they_were_made_durable(tmp_path, stored):
    gateway = Gateway(stored, tmp_path)
    async with living(gateway):
        await gateway.say(offer(stored, soak_s=10.0))
        await asyncio.sleep(60)
        told = list(dict.fromkeys(gateway.states))
        assert told == [one for one in ("offered", "fetched", "trial", "committed") if one in told]
        assert told[-1] == "committed"


def test_a_bundle_of_another_length_is_refused(tmp_path, stored):
    board = FieldBoard(DEVICE, MemoryTransport(), tmp_path / DEVICE)
    board.folder.mkdir()
    missing = MissingParts(board.store, stored.manifest)
    lacking = missing.find_lacking()
    bundle = tmp_path / "bundle"
    bundle.write_bytes(b"x")
    with pytest.raises(CorruptFile):
        missing.store(lacking, bundle)
    with pytest.raises(WireError):
        missing.store(Lacking(frozenset({"0" * 64})), bundle)


@pytest.mark.parametrize(
    ("runtime", "opset", "is_refused"),
    [("1.17.3", 20, False), ("1.17.3", 21, True), ("1.99.0", 40, False), ("", 40, False), ("weird", 40, False)],
)
def test_a_runtime_that_is_too_old_is_known_by_its_version(stored, runtime, opset, is_refused):
    manifest: ReleaseManifest = msgspec.structs.replace(stored.manifest, opset=opset)
    assert bool(runtime_refusal(manifest, runtime)) is is_refused
