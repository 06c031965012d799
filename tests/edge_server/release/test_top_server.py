"""Upper halves served to devices: by real brokers and in memory, with floods, damage, restarts and deadlines."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_agent.exchange.remote_top import MOST_WAITING, RemoteTop
from device_agent.inference.collaborative.interface import TopReply
from edge_server.plan.server_config import ServerConfig, TopsConfig
from edge_server.release.store import delete_release
from edge_server.release.top_server import service
from edge_server.release.top_server.service import TopServer
from shared.errors import InferenceRefused, Unreachable
from shared.protocol import payload, wire
from shared.protocol.inference.collaborative import TopAnswer, TopRequest
from shared.protocol.messages import LOSSLESS, Blob, Payload, Spec, Transfer, Want
from shared.protocol.topics import TOPS, topic
from shared.runtime.executor import background, inline
from shared.runtime.processes import kill
from shared.tensors import feature_codec
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Broker
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import build_presence
from tests.edge_server.release.runs import LowerHalf, release_with_halves
from tests.naming import naming

pytest.importorskip("onnx")

SITE, FRAME = "roof", 16 << 10
CLOSE = 1e-5
"""What ONNX Runtime may differ from PyTorch by, as a share of the largest output."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lower(folder) -> LowerHalf:
    """Return a small network's lower half, whose features take a few frames."""
    return LowerHalf.of(release_with_halves(folder, "lenet", cut=1, name="letters", seed=2))


@pytest.fixture(scope="module")
def small(folder) -> LowerHalf:
    return LowerHalf.of(release_with_halves(folder))


def config(folder: Path, **tops: int) -> ServerConfig:
    return ServerConfig(plan="none.toml", site=SITE, data_dir=str(folder), tops=TopsConfig(**tops))


def remote(transport, device: str, **options) -> RemoteTop:
    clock = asyncio.get_running_loop().time
    return RemoteTop(transport, SITE, device, f"instance of {device}", clock, FRAME, **options)


@asynccontextmanager
async def serving(transport, folder: Path, **tops: int):
    """Serve a folder's releases while the block lasts, in this loop."""
    server = service.compose(config(folder, **tops), transport, clock=asyncio.get_running_loop().time)
    server.worker = inline
    async with background(server.run()):
        await asyncio.sleep(0.01)  # until it hears devices
        yield server


@asynccontextmanager
async def in_memory(folder: Path, *devices: str, **tops: int):
    """Serve some devices over a broker in memory; yields the server, the broker, and each device's way to it."""
    transport = MemoryTransport()
    async with serving(transport, folder, **tops) as server:
        ways = [remote(transport, device) for device in devices]
        async with background(*(way.run() for way in ways)):
            yield server, transport, *ways


async def test_three_devices_at_once_have_what_pytorch_computes(site, folder, lower):
    """Over every transport; features of several frames, by each codec; every part of the time is told."""
    async with site.clients(4) as [mine, *theirs], serving(mine, folder) as server:
        ways = [remote(one, f"pi-{number}") for number, one in enumerate(theirs)]
        async with background(*(way.run() for way in ways)):
            for spec, most in (
                (LOSSLESS, CLOSE),
                (Spec(name="float16"), 2e-3),
                (Spec(name="quantize", options={"bits": 8}), 5e-2),
            ):
                parts = lower.features(8, spec)
                size = sum(part.nbytes for part in parts)
                replies = await asyncio.gather(*(way(lower.half, parts, 30.0) for way in ways))
                for reply in replies:
                    assert lower.error(reply.outputs, 8) <= most
                    assert reply.bytes_up > size > 0
                    assert reply.bytes_down > len(reply.outputs) > 0
                    assert 0 <= reply.timing.waited_s + reply.timing.compute_s <= reply.round_trip_s
        assert server.metrics.requests == 9
        assert not server.intake.pending


@pytest.mark.virtual_time
async def test_a_payload_that_went_before_leaves_room_for_the_next_unasked(folder, lower):
    """The first request is asked for in windows that grow; the next comes pushed, in one go, and nothing is asked."""
    async with in_memory(folder, "pi") as (server, transport, way):
        async with transport.subscribe(topic(SITE, "pi", "inferred")) as told:
            counts = []
            for _ in range(2):
                assert lower.error((await way(lower.half, lower.features(8), 5.0)).outputs, 8) <= CLOSE
                counts.append(sum(isinstance(wire.decode(data), Want) for _, data in told.drain()))
        assert counts[0] > counts[1] == 0
        assert server.metrics.refused.total() == 0


@pytest.mark.virtual_time
async def test_requests_of_a_device_wait_for_one_another(folder, small):
    """One is in flight; so many wait, and the next is told at once that there are too many."""
    async with in_memory(folder, "pi") as (server, _, way):
        asked = [asyncio.ensure_future(way(small.half, small.features(), 5.0)) for _ in range(1 + MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(InferenceRefused) as refused:
            await way(small.half, small.features(), 5.0)
        assert refused.value.reason == "busy"
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, len(server.intake.pending))
            await asyncio.sleep(0)
        assert most == 1
        assert all(small.error(one.result().outputs) <= CLOSE for one in asked)


@pytest.mark.virtual_time
async def test_without_a_server_a_request_ends_at_its_deadline_and_the_next_at_once(folder, small):
    """A device that may fall back does not wait again and again; a server that comes is found."""
    loop, transport = asyncio.get_running_loop(), MemoryTransport()
    way = remote(transport, "pi")
    async with background(way.run()):
        began = loop.time()
        with pytest.raises(Unreachable, match=naming("2 s")):
            await way(small.half, small.features(), 2.0)
        assert loop.time() - began == pytest.approx(2.0)
        with pytest.raises(Unreachable):
            await way(small.half, small.features(), 2.0)
        assert loop.time() - began == pytest.approx(2.0)
        async with serving(transport, folder):
            presence = build_presence(TOPS, SITE, "one", 1)
            await transport.publish(presence.topic, presence.birth, retain=True)
            await asyncio.sleep(0.1)
            assert small.error((await way(small.half, small.features(), 2.0)).outputs) <= CLOSE
            await transport.publish(presence.topic, presence.will, retain=True)
            await asyncio.sleep(0.1)
            with pytest.raises(Unreachable):
                await way(small.half, small.features(), 2.0)
            assert loop.time() - began < 2.5, "it did not wait for the deadline"


@pytest.mark.virtual_time
async def test_a_server_that_dies_under_a_request_is_said_at_once(folder, small):
    loop, transport = asyncio.get_running_loop(), MemoryTransport()
    way = remote(transport, "pi")
    async with background(way.run()):
        presence = build_presence(TOPS, SITE, "one", 1)
        await transport.publish(presence.topic, presence.birth, retain=True)
        asking = asyncio.ensure_future(way(small.half, small.features(), 30.0))
        await asyncio.sleep(1.0)
        await transport.publish(presence.topic, presence.will, retain=True)
        with pytest.raises(Unreachable):
            await asking
        assert loop.time() < 2.0


def half_here(server: TopServer) -> bool:
    """Tell whether some of the features are here, and not all."""
    held = server.intake.pending.get("pi")
    return held is not None and held.receiver is not None and held.receiver.bytes_received > 0


@pytest.mark.virtual_time
async def test_a_request_goes_on_with_a_server_that_has_restarted(folder, lower):
    """The first one dies with half of the features; the device hears of the second, and says its request again."""
    transport = MemoryTransport()
    way = remote(transport, "pi")
    async with background(way.run()), AsyncExitStack() as first:
        server = await first.enter_async_context(serving(transport, folder))
        asking = asyncio.ensure_future(way(lower.half, lower.features(10), 30.0))
        while not half_here(server):  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0)
        await first.aclose()
        async with serving(transport, folder) as second:
            presence = build_presence(TOPS, SITE, "two", 2)
            await transport.publish(presence.topic, presence.birth, retain=True)
            assert lower.error((await asking).outputs, 10) <= CLOSE
            assert second.metrics.requests == 1


async def answered(way: RemoteTop, lower: LowerHalf) -> TopReply:
    """Return the first answer, however long it takes."""
    while True:
        with suppress(Unreachable):
            return await way(lower.half, lower.features(), 5.0)
        await asyncio.sleep(0.02)


async def gone(way: RemoteTop, lower: LowerHalf) -> None:
    """Wait until the end of the server's process is known."""
    while way.server_status is None or way.server_status.online:  # noqa: ASYNC110 - its status comes from the broker
        await asyncio.sleep(0.02)
    with pytest.raises(Unreachable):
        await way(lower.half, lower.features(), 5.0)


@pytest.mark.broker
async def test_a_server_goes_and_another_comes(mosquitto_port, folder, small):
    """By MQTT's will and birth: the end of the server's process is known, and its successor is found."""
    broker = Broker(port=mosquitto_port)
    async with MqttTransport(broker, f"{SITE}.pi").running() as mine:
        way = remote(mine, "pi")
        async with background(way.run()):
            for number in (1, 2):
                presence = build_presence(TOPS, SITE, f"one-{number}", number)
                client = MqttTransport(broker, f"{SITE}.{TOPS}", lambda presence=presence: presence)
                async with client.running() as its, serving(its, folder):
                    assert small.error((await answered(way, small)).outputs) <= CLOSE
                await gone(way, small)


def features_of(shape: tuple[int, ...], value: float = 0.5) -> list[memoryview]:
    return payload.pack(feature_codec.encode_features("features", np.full(shape, value, np.float32), LOSSLESS))


def dense(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> list[memoryview]:
    return payload.pack(Payload(codec="dense", blobs={name: Blob(dtype, shape, memoryview(data))}))


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("unknown-release", lambda half, parts: (msgspec.structs.replace(half, name="nobody"), parts)),
        ("unknown-release", lambda half, parts: (msgspec.structs.replace(half, version=99), parts)),
        ("unknown-release", lambda half, parts: (msgspec.structs.replace(half, name="whole"), parts)),
        ("other-release", lambda half, parts: (msgspec.structs.replace(half, parameters=bytes(32)), parts)),
        ("shape", lambda half, _: (half, features_of((1, 7)))),
        ("shape", lambda half, _: (half, dense("inputs", "f32", (1, 4), bytes(16)))),
        ("dtype", lambda half, _: (half, dense("features", "f64", (1, 4), bytes(32)))),
        ("not-finite", lambda half, _: (half, features_of((1, 4), np.inf))),
        ("malformed", lambda half, _: (half, [memoryview(b"no payload at all")])),
        ("oversized", lambda half, _: (half, [memoryview(bytes((1 << 20) + 1))])),
    ],
)
@pytest.mark.virtual_time
async def test_what_cannot_be_served_is_refused_with_its_cause(folder, small, reason, change):
    """And the next request of the same device is served."""
    if not (folder / "releases" / "names" / "whole").exists():
        from edge_server.release.create import create_release  # noqa: PLC0415
        from edge_server.release.run_model import read_model  # noqa: PLC0415
        from tests.edge_server.release.runs import leave_run  # noqa: PLC0415

        create_release(read_model(leave_run(folder, "mlp", run="whole-20260101T000000Z-aaaa")), folder, "whole")
    async with in_memory(folder, "pi", max_features_mb=1) as (server, _, way):
        half, parts = change(small.half, small.features())
        if half.name == "whole":
            half = msgspec.structs.replace(half, parameters=bytes(32))
        with pytest.raises(InferenceRefused) as refused:
            await way(half, parts, 20.0)
        assert refused.value.reason == reason
        assert server.metrics.refused[reason] == 1
        assert not server.intake.pending
        assert small.error((await way(small.half, small.features(), 20.0)).outputs) <= CLOSE


@pytest.mark.virtual_time
async def test_a_release_that_was_deleted_or_damaged_is_not_served(tmp_path):
    first, second = (LowerHalf.of(release_with_halves(tmp_path, seed=seed)) for seed in (1, 2))
    digest = second.half.parameters.hex()
    delete_release(tmp_path, "digits/1")
    path = tmp_path / "releases" / "blobs" / digest
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    async with in_memory(tmp_path, "pi") as (_, _, way):
        for one in (first, second):
            with pytest.raises(InferenceRefused) as refused:
                await way(one.half, one.features(), 5.0)
            assert refused.value.reason == "unknown-release"
        third = LowerHalf.of(release_with_halves(tmp_path, seed=3))
        assert third.error((await way(third.half, third.features(), 5.0)).outputs) <= CLOSE


@pytest.mark.virtual_time
async def test_what_all_devices_may_have_here_is_bounded(folder, small):
    """Requests and bytes: one beyond them is told to ask later; the memory of those that never send is free again."""

    async def offer(transport, device: str, size: int) -> None:
        request = TopRequest(
            device=device,
            instance="one",
            number=1,
            name=small.half.name,
            version=small.half.version,
            parameters=small.half.parameters,
            params=Transfer(digest=bytes(16), size=size, frame_bytes=FRAME),
            deadline_s=3.0,
        )
        await transport.publish(topic(SITE, device, "infer"), wire.encode(request))
        await asyncio.sleep(0.01)

    async with in_memory(folder, "pi", waiting=4, max_features_mb=1, held_mb=2) as (server, transport, way):
        for number in range(8):
            await offer(transport, f"greedy-{number}", 1 << 20)
        assert (len(server.intake.pending), server.intake.pending_bytes) == (2, 2 << 20)
        with pytest.raises(InferenceRefused) as refused:
            await way(small.half, small.features(), 2.0)
        assert refused.value.reason == "busy"
        await asyncio.sleep(4.0)
        assert (len(server.intake.pending), server.intake.pending_bytes) == (0, 0)
        for number in range(8):
            await offer(transport, f"modest-{number}", 1024)
        assert len(server.intake.pending) == 4
        await asyncio.sleep(4.0)
        assert small.error((await way(small.half, small.features(), 2.0)).outputs) <= CLOSE


@pytest.mark.virtual_time
async def test_a_newer_request_takes_the_place_of_an_older_one(folder, small):
    """A device that asks again and again holds no more than one."""
    async with in_memory(folder) as (server, transport):
        async with transport.subscribe(topic(SITE, "pi", "inferred")) as told:
            sender = Sender.of_parts(small.features(), FRAME)
            for number in range(1, 20):
                request = TopRequest(
                    device="pi",
                    instance="one",
                    number=number,
                    name=small.half.name,
                    version=small.half.version,
                    parameters=small.half.parameters,
                    params=sender.transfer,
                    deadline_s=9.0,
                )
                await transport.publish(topic(SITE, "pi", "infer"), wire.encode(request))
            await asyncio.sleep(0.1)
            assert server.intake.pending["pi"].request.number == 19
            await transport.publish(topic(SITE, "pi", "infer"), sender.frame(0, sender.transfer.blocks))
            await asyncio.sleep(0.1)
            answers = [one for _, data in told.drain() if isinstance(one := wire.decode(data), TopAnswer)]
        assert [one.number for one in answers] == [19]
        assert small.error(answers[0].outputs) <= CLOSE


@pytest.mark.virtual_time
async def test_a_flood_of_one_device_takes_nothing_from_another(folder, small):
    """Garbage, frames nobody asked for, requests in another's name: dropped, counted, and the channel is closed."""

    async def flood(transport, server: TopServer) -> None:
        sender = Sender.of_parts([memoryview(bytes(64 << 10))], FRAME)
        strange = sender.frame(0, 16)
        stolen = wire.encode(
            TopRequest(
                device="pi",
                instance="one",
                number=1,
                name="digits",
                version=1,
                parameters=bytes(32),
                params=sender.transfer,
                deadline_s=9.0,
            )
        )
        for number in range(3000):
            data = (b"FM\x01garbage", strange, strange[:-1], stolen, bytes(9000))[number % 5]
            await transport.publish(topic(SITE, "foe", "infer"), data)
            if number % 100 == 0:
                await asyncio.sleep(0.001)
        assert server.flood.limits.closed_topics == {topic(SITE, "foe", "infer").encode()}

    async with in_memory(folder, "pi") as (server, transport, way):
        assert small.error((await way(small.half, small.features(), 5.0)).outputs) <= CLOSE
        flooding = asyncio.ensure_future(flood(transport, server))
        for _ in range(20):
            assert small.error((await way(small.half, small.features(), 5.0)).outputs) <= CLOSE
        await flooding
        assert small.error((await way(small.half, small.features(), 5.0)).outputs) <= CLOSE
        assert not server.intake.pending
        assert not server.flood.admits(topic(SITE, "foe", "infer"), 1 << 20)
        assert server.flood.admits(topic(SITE, "pi", "infer"), FRAME)


@pytest.mark.virtual_time
async def test_features_that_come_damaged_are_asked_for_again(folder, small):
    """A frame whose checksum fails is dropped; a payload whose digest fails three times is refused, and said so."""
    async with in_memory(folder) as (server, transport):
        name = topic(SITE, "pi", "infer")
        other = Sender.of_parts(features_of((1, 4), 0.25), FRAME)
        sender = Sender.of_parts(features_of((1, 4)), FRAME)
        wrong = frames.encode(sender.transfer, 0, other.source.read(0, sender.transfer.size))
        request = TopRequest(
            device="pi",
            instance="one",
            number=1,
            name=small.half.name,
            version=small.half.version,
            parameters=small.half.parameters,
            params=sender.transfer,
            deadline_s=30.0,
        )
        async with transport.subscribe(topic(SITE, "pi", "inferred")) as told:
            await transport.publish(name, wire.encode(request))
            await transport.publish(name, wrong[:-1] + b"x")
            for _ in range(3):
                await asyncio.sleep(0.1)
                await transport.publish(name, wrong)
            await asyncio.sleep(0.1)
            answers = [one for _, data in told.drain() if isinstance(one := wire.decode(data), TopAnswer)]
        assert [one.reason for one in answers] == ["digest"]
        assert not server.intake.pending


def has_torch(pid: int) -> bool:
    """Tell whether a process has loaded torch's library."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.broker
async def test_the_command_serves_without_torch(mosquitto_port, tmp_path):
    """A process of its own: it answers, has not loaded torch, and ends with 0 when it is told to."""
    lower = LowerHalf.of(release_with_halves(tmp_path / "runs"))
    port = mosquitto_port
    path = tmp_path / "server.toml"
    path.write_text(f'plan = "none.toml"\nsite = "command"\n[broker]\nport = {port}\n[tops]\nthreads = 1\n')
    words = (sys.executable, "-m", "edge_server", "serve-tops", "--config", str(path))
    async with MqttTransport(Broker(port=port), "command.pi").running() as mine:
        way = replace(remote(mine, "pi"), site="command")
        async with background(way.run()):
            process = await asyncio.create_subprocess_exec(*words)
            try:
                assert lower.error((await answered(way, lower)).outputs) <= CLOSE
                assert not has_torch(process.pid)
                process.terminate()
                assert await process.wait() == 0
                await gone(way, lower)
            finally:
                await kill(process)
