"""Broker capability test: each lack is found, with the setting to change."""

from __future__ import annotations

import asyncio

import pytest

from shared.transport.base import Broker
from shared.transport.capabilities import QOS, RETAIN, SIZE, WILL, find_lacks
from tests.machine import configured

pytestmark = pytest.mark.broker

SIZE_IN_USE = (256 << 10) + 64
TOPIC = "ff/lab/pi-1/probe"
VERSIONS = pytest.mark.parametrize("version", [5, 3])


async def lacks_of(folder, *lines: str, version: int) -> dict[str, str]:
    async with configured(folder, "allow_anonymous true", *lines) as broker:
        place = Broker(port=broker.port, version=version)
        found = await find_lacks(place, "doctor", TOPIC, SIZE_IN_USE, patience_s=2.0)
        again = await find_lacks(place, "doctor", TOPIC, SIZE_IN_USE, patience_s=2.0)
        assert [one.what for one in again] == [one.what for one in found]  # nothing is left behind
    assert all(one.setting for one in found)
    return {one.what: f"{one.found}: {one.setting}" for one in found}


@VERSIONS
def test_a_broker_that_does_everything(tmp_path, real, version):
    assert real(lacks_of(tmp_path, "max_packet_size 8388608", version=version)) == {}


@VERSIONS
@pytest.mark.parametrize(
    ("line", "lacks", "words"),
    [
        ("retain_available false", {RETAIN, WILL}, "retain_available true"),  # wills of agents are retained
        ("max_qos 0", {QOS}, "max_qos 2"),
        ("message_size_limit 100000", {SIZE}, "messages of 64 KiB pass: allow it: `max_packet_size 8388608`"),
        ("max_packet_size 40000", {SIZE}, "messages of 32 KiB pass"),
    ],
)
def test_each_lack_is_found_with_the_setting_to_change(tmp_path, real, version, line, lacks, words):
    """MQTT 5 is told that a message is too large; under 3.1.1 it is acknowledged and dropped."""
    found = real(lacks_of(tmp_path, line, version=version))
    assert set(found) == lacks
    assert words in " ".join(found.values())


def test_an_access_list_that_denies_the_will(tmp_path, real):
    (tmp_path / "acl").write_text(f"topic read {TOPIC}\n")
    found = real(lacks_of(tmp_path, f"acl_file {tmp_path / 'acl'}", version=5))
    assert set(found) == {QOS}
    assert "Not authorized" in found[QOS]


async def test_the_topic_is_empty_afterwards(tmp_path):
    """Neither the retained message nor the will stays with the broker."""
    async with configured(tmp_path, "allow_anonymous true") as broker:
        place = Broker(port=broker.port)
        assert await find_lacks(place, "doctor", TOPIC, 1 << 14, patience_s=5.0) == []
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writer.write(b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x3c\x00\x03ear")
        assert (await reader.readexactly(4))[3] == 0
        topic = TOPIC.encode()
        writer.write(b"\x82" + bytes([len(topic) + 5]) + b"\x00\x01" + b"\x00" + bytes([len(topic)]) + topic + b"\x01")
        assert (await reader.readexactly(5))[0] == 0x90
        writer.write(b"\xc0\x00")
        assert await reader.readexactly(2) == b"\xd0\x00"  # and no message before it
        writer.close()
