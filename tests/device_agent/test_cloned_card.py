"""A board that starts from a copy of another board's card delivers nothing of the other one."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from device_agent.exchange import owner
from device_agent.exchange.outbox import Outbox
from edge_server.fleet.broker import run_private_broker
from shared.protocol import wire
from shared.protocol.messages import Update
from shared.protocol.topics import topic
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.device_agent.agent_side import DEVICE, LIMIT_S, SITE, line_with, living, write_config

QUIET_S = 2.0


def leave_update(state: Path, device: str) -> None:
    """Leave an update that waits for the server, and a state of the device."""
    Outbox(state / "outbox", state / "state").add(Update(run="trial", round=3, device=device, params=None, failure="x"))
    (state / "state" / "trial").write_bytes(b"personal")


@pytest.mark.broker
@pytest.mark.parametrize("is_recorded", [True, False])
async def test_an_update_of_the_copied_board_is_set_aside_and_not_delivered(tmp_path, is_recorded):
    """Also where the card was copied before a version that records whose it is."""
    async with (
        asyncio.timeout(LIMIT_S),
        run_private_broker(tmp_path) as broker,
        MqttTransport(Broker(port=broker.port), "tester").running() as transport,
    ):
        await transport.connected.wait()
        path = write_config(tmp_path, broker.port)
        leave_update(tmp_path / "state", "other")
        if is_recorded:
            owner.claim(tmp_path / "state", "other")
        async with transport.subscribe(topic(SITE, DEVICE, "update")) as inbox, living(path) as process:
            await line_with(process, "device other", "of-other.kept-1")
            await line_with(process, "INFO", "shared.transport.mqtt")
            await asyncio.sleep(QUIET_S)
            assert [data for _, data in inbox.drain()] == []
    aside = tmp_path / "state" / "of-other.kept-1"
    assert [one.update.device for one in Outbox(aside / "outbox", aside / "state").entries()] == ["other"]
    assert (aside / "state" / "trial").read_bytes() == b"personal"


def test_what_is_the_devices_own_stays(tmp_path):
    leave_update(tmp_path, "board")
    for _ in range(2):
        owner.claim(tmp_path, "board")
        assert (tmp_path / "state" / "trial").exists()
    shutil.rmtree(tmp_path / "outbox")
    (tmp_path / owner.FILE).write_text("not json")
    owner.claim(tmp_path, "board")
    assert [path.name for path in tmp_path.glob("of-*")] == []


def test_each_copy_has_a_folder_of_its_own(tmp_path):
    for name in ("a", "b", "a", "c"):
        owner.claim(tmp_path, name)
        leave_update(tmp_path, name)
    assert sorted(path.name for path in tmp_path.glob("of-*")) == ["of-a.kept-1", "of-a.kept-2", "of-b.kept-1"]
    waiting = Outbox(tmp_path / "outbox", tmp_path / "state").entries()
    assert [wire.decode_as(Update, wire.encode(one.update)).device for one in waiting] == ["c"]


def test_a_power_cut_while_it_is_set_aside_leaves_no_state_of_the_other_board(tmp_path, monkeypatch):
    """Of a card without a record the waiting updates alone tell whose it is: they are moved last."""
    leave_update(tmp_path, "other")
    whole, moved = Path.rename, list[str]()

    def cut(path: Path, to: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return whole(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut)
        with pytest.raises(KeyboardInterrupt):
            owner.claim(tmp_path, "board")
    owner.claim(tmp_path, "board")
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "outbox").exists()
