"""MQTT will of a killed process, with its session number."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import ANY, topic

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[3]
DEVICE = """
import asyncio, sys
from pathlib import Path
from shared.transport.presence import Session
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport

async def live(port, version, counter, instance):
    session = Session(Path(counter), "pi-4", "attic", instance)
    broker = Broker(port=int(port), version=int(version))
    async with MqttTransport(broker, "attic/pi-4", session.presence).running():
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(live(*sys.argv[1:]))
"""


@asynccontextmanager
async def device(broker, counter, instance):
    """Run a small client as a process of its own; it says goodbye when its standard input ends."""
    command = (sys.executable, "-c", DEVICE, str(broker.port), str(broker.version), str(counter), instance)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def status(inbox) -> Status:
    name, data = await anext(inbox)
    assert name == topic("attic", "pi-4", "status")
    return wire.decode_as(Status, data)


async def test_born_killed_and_born_again(mortal, tmp_path):
    """kill -9: the will comes, with the birth's number and instance. The next counts on and says goodbye itself.

    What the broker keeps for those who come later is always the last word.
    """
    statuses = topic("attic", ANY, "status")
    async with (
        mortal.alive(),
        mortal.transport("server").running() as server,
        mortal.transport("late").running() as latecomer,
    ):
        await asyncio.gather(server.connected.wait(), latecomer.connected.wait())
        async with server.subscribe(statuses) as inbox:
            async with device(mortal, tmp_path / "session", "first") as process:
                birth = await status(inbox)
                assert (birth.online, birth.session, birth.instance) == (True, 1, "first")
                process.kill()
                will = await status(inbox)
                assert (will.online, will.session, will.instance) == (False, 1, "first")
            async with latecomer.subscribe(statuses) as late:
                assert await status(late) == will
            async with device(mortal, tmp_path / "session", "second") as process:
                birth = await status(inbox)
                assert (birth.online, birth.session, birth.instance) == (True, 2, "second")
                process.stdin.close()
                goodbye = await status(inbox)
                assert (goodbye.online, goodbye.session, goodbye.instance) == (False, 2, "second")
                assert await process.wait() == 0
        async with server.subscribe(statuses) as inbox:
            assert await status(inbox) == goodbye


async def test_every_reconnect_is_a_new_session(mortal, kill_broker, tmp_path):
    """After an outage the same process is born again under the next number: a death of before cannot end it."""
    numbers: list[int] = []
    async with device(mortal, tmp_path / "session", "one"), mortal.transport("server").running() as server:
        for _ in range(2):
            async with server.subscribe(topic("attic", ANY, "status")) as inbox, mortal.alive() as broker:
                birth = await status(inbox)
                assert birth.online
                assert birth.session == int((tmp_path / "session").read_text())
                numbers.append(birth.session)
                await kill_broker(broker)
    assert numbers[0] < numbers[1]
