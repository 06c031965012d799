"""What the broker refuses is told to the operator; what nobody wants any more is taken back."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import Unreachable
from shared.transport.base import Broker, Presence
from shared.transport.mqtt import MqttTransport
from tests.machine import configured
from tests.naming import names_all, naming

pytestmark = pytest.mark.broker

PLUGIN = Path("/usr/lib/x86_64-linux-gnu/mosquitto_dynamic_security.so")


def errors(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


async def test_a_publication_that_the_access_list_denies(tmp_path, caplog):
    """MQTT 5: not accepted, told once with topic, cause and remedy; what is allowed goes on, on the same connection.

    A birth that is denied keeps nobody from working: the session stands.
    """
    (tmp_path / "acl").write_text("topic readwrite mine/#\n")
    async with configured(tmp_path, "allow_anonymous true", f"acl_file {tmp_path / 'acl'}") as broker:
        device = MqttTransport(Broker(port=broker.port), "pi-4", lambda: Presence("theirs/status", b"birth", b"will"))
        async with device.running(), device.subscribe("mine/x") as inbox:
            await device.connected.wait()
            connection = device.connection
            for _ in range(2):
                with pytest.raises(Unreachable, match=naming("theirs/x", "Not authorized")):
                    await device.publish("theirs/x", b"")
            await device.publish("mine/x", b"mine")
            assert (await anext(inbox))[1] == b"mine"
            assert device.connection is connection
    status, denied = errors(caplog)
    assert names_all(status, "theirs/status", "Not authorized", "pi-4")
    assert names_all(denied, "theirs/x", "Not authorized", "pi-4")


@pytest.mark.skipif(not PLUGIN.exists(), reason="mosquitto's access list denies no subscription; its plugin is absent")
@pytest.mark.parametrize(("version", "cause"), [(5, "Not authorized"), (3, "Unspecified error")])
async def test_a_subscription_that_is_denied(tmp_path, caplog, version, cause):
    """Told once for each topic, whether opened before or while connected, and again on no reconnect."""
    rules = {"publishClientSend": True, "publishClientReceive": True, "subscribe": False, "unsubscribe": True}
    settings = tmp_path / "dynamic-security.json"
    settings.write_text(json.dumps({"defaultACLAccess": rules, "clients": [], "groups": [], "roles": []}))
    plugin = (f"plugin {PLUGIN}", f"plugin_opt_config_file {settings}")
    async with configured(tmp_path, "allow_anonymous true", *plugin) as broker:
        device = MqttTransport(Broker(port=broker.port, version=version), "pi-4")
        async with device.running(), device.subscribe("early"):
            await device.connected.wait()
            async with device.subscribe("late/+"):
                device.connection.client.socket().shutdown(2)
                await device.connection.lost
                await asyncio.sleep(0.01)
                await device.connected.wait()
    early, late = errors(caplog)
    assert names_all(early, "early", cause, "pi-4")
    assert names_all(late, "late/+", cause, "pi-4")


@asynccontextmanager
async def eavesdropped(port: int):
    """Yield the near end of a line to the broker, and what it has carried down."""
    down = bytearray()

    async def carry(reader, writer, heard=None):
        while data := await reader.read(65536):
            if heard is not None:
                heard += data
            writer.write(data)
        writer.close()

    async def join(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer, down), return_exceptions=True)

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], down


@pytest.mark.parametrize("version", [5, 3])
async def test_left_while_the_broker_was_out_of_reach(tmp_path, version):
    """The session at the broker still has the subscription: it is taken back on reconnecting, before anything comes."""
    async with configured(tmp_path, "allow_anonymous true") as broker, eavesdropped(broker.port) as (port, down):
        server = MqttTransport(Broker(port=broker.port), "server")
        device = MqttTransport(Broker(port=port, version=version), "device")
        async with server.running(), device.running(), device.subscribe("end") as end:
            await asyncio.gather(server.connected.wait(), device.connected.wait())
            async with device.subscribe("model/+"):
                device.connection.client.socket().shutdown(2)
                await device.connection.lost
                while device.connected.is_set():  # noqa: ASYNC110 - reconnecting takes a thread, this takes none
                    await asyncio.sleep(0)
            await device.connected.wait()
            await device.publish("word", b"")  # when the broker has this, it has heard of the end
            await server.publish("model/1", b"unwanted")
            await server.publish("end", b"")
            await anext(end)
            assert b"unwanted" not in down


@pytest.mark.parametrize("version", [5, 3])
async def test_left_behind_by_a_process_that_was_killed(tmp_path, version):
    """What comes for nobody is taken back at once: one frame crosses the line in vain, not all of them."""
    async with configured(tmp_path, "allow_anonymous true") as broker, eavesdropped(broker.port) as (port, down):
        server = MqttTransport(Broker(port=broker.port), "server")
        killed = MqttTransport(Broker(port=broker.port, version=version), "device")
        again = MqttTransport(Broker(port=port, version=version), "device")
        async with server.running():
            async with killed.running():
                opened = killed.subscribe("model")
                await killed.connected.wait()
                await opened.__aenter__()
            async with again.running(), again.subscribe("end") as end:
                await asyncio.gather(server.connected.wait(), again.connected.wait())
                for number in range(9):
                    await server.publish("model", b"unwanted %d" % number)
                    await again.publish("word", b"")  # the broker's answer comes after what it forwarded before
                await server.publish("end", b"")
                await anext(end)
                assert 1 <= down.count(b"unwanted") <= 2


async def test_too_large_for_the_broker_is_told_once(tmp_path, caplog):
    """With the name of what to raise."""
    async with configured(tmp_path, "allow_anonymous true", "max_packet_size 1000") as broker:
        device = MqttTransport(Broker(port=broker.port), "pi-4")
        async with device.running():
            await device.connected.wait()
            for _ in range(2):
                with pytest.raises(Unreachable):
                    await device.publish("x", bytes(1000))
    [told] = errors(caplog)
    assert names_all(told, 1000, "x", 744, "max_packet_size")
