"""Two servers at one site are detected; a former server is not one."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from itertools import count

import pytest

from edge_server.__main__ import EXIT_BUSY
from edge_server.fleet import single_server
from edge_server.fleet.broker import find_mosquitto, run_private_broker
from shared.errors import SiteBusy
from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import SERVER, topic
from shared.runtime.executor import background
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import SITE, virtual, write_plan
from tests.edge_server.processes import PATIENCE_S, forked, until
from tests.naming import names_all, naming

pytestmark = pytest.mark.virtual_time


def word(instance: str, session: int, *, online: bool) -> bytes:
    return wire.encode(Status(device=SERVER, session=session, instance=instance, online=online))


BEFORE = [word("before", 1, online=True), word("before", 1, online=False)]
OURS = [word("ours", 2, online=True), word("ours", 2, online=False), word("ours", 3, online=True)]
FIRST = [word("rival", 6, online=False)]
RIVAL = [word("ours", 2, online=True), word("rival", 7, online=False), word("ours", 3, online=True)]


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ([*BEFORE, *OURS], False),
        ([OURS[0], *BEFORE[1:], *OURS[1:]], False),
        ([*FIRST, b"", b"noise", *RIVAL], False),
        ([*FIRST, *RIVAL, word("rival", 8, online=False)], True),
        ([*FIRST, *RIVAL, word("rival", 8, online=True)], True),
        ([*BEFORE, *RIVAL, word("rival", 8, online=True)], False),
    ],
    ids=[
        "our own sessions",
        "a late will",
        "a single word",
        "thrown out twice",
        "it is online",
        "who was here first stays",
    ],
)
def test_another_process_that_takes_the_name_twice_is_another_server(words, ends):
    async def play() -> None:
        broker = MemoryTransport()
        watching = single_server.require_single_server(
            broker, SITE, "ours", connections=count(1).__next__, gives_way=True
        )
        async with background(watching):
            await asyncio.sleep(0)
            for data in words:
                await broker.publish(topic(SITE, SERVER, "status"), data, retain=True)
            await asyncio.sleep(1)

    if not ends:
        virtual(play())
        return
    with pytest.raises(SiteBusy, match=naming(SITE, "edge-server submit")):
        virtual(play())


async def test_the_sites_own_server_stays_and_says_so(caplog):
    broker = MemoryTransport()
    watching = single_server.require_single_server(broker, SITE, "ours", connections=count(1).__next__, gives_way=False)
    async with background(watching):
        await asyncio.sleep(0)
        for data in [*RIVAL, word("rival", 8, online=False), word("rival", 9, online=False)]:
            await broker.publish(topic(SITE, SERVER, "status"), data, retain=True)
        await asyncio.sleep(1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_words_alone_are_no_server(caplog):
    """Whoever may publish there says it: as long as nobody throws us off the broker, there is no other server."""
    broker = MemoryTransport()
    watching = single_server.require_single_server(broker, SITE, "ours", connections=lambda: 1, gives_way=True)
    async with background(watching):
        await asyncio.sleep(0)
        for data in [*FIRST, *RIVAL, *(word("rival", number, online=True) for number in range(8, 20))]:
            await broker.publish(topic(SITE, SERVER, "status"), data, retain=True)
        await asyncio.sleep(1)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_a_trial_that_is_begun_beside_the_sites_server_gives_way_to_it(tmp_path):
    """Both as processes: the trial ends with code 3 and leaves no run, the other one says so and goes on waiting."""
    path = write_plan(tmp_path, rounds=1)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        port = runner.run(stack.enter_async_context(run_private_broker(tmp_path))).port
        config = tmp_path / "server.json"
        keys = {"plan": str(path), "site": "lab", "data_dir": str(tmp_path / "runs"), "broker": {"port": port}}
        config.write_text(json.dumps(keys | {"data_root": str(tmp_path)}))
        own, trial = tmp_path / "own.log", tmp_path / "trial.log"
        words = ("trial", "run", path, "--config", config, "--data-dir", tmp_path / "trials")
        try:
            with forked("run", "--config", config, log=own) as server:
                until(lambda: f"127.0.0.1:{port}" in own.read_text(), "the site's server is connected")
                before = len(own.read_text())
                with forked(*words, log=trial) as second:
                    assert second.wait(PATIENCE_S) == EXIT_BUSY
                until(lambda: "'lab'" in own.read_text()[before:], "it logs that there is another server")
                assert server.poll() is None
        finally:
            runner.run(stack.aclose())
    assert names_all(trial.read_text(), "'lab'")
    assert not list((tmp_path / "trials").glob("tiny-*"))
