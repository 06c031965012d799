"""Server on a full disk: continue, wait or end at once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re

import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import UpdateAccepted
from edge_server.rounds import quorum
from shared.protocol import wire
from shared.protocol.messages import Want
from tests.edge_server.harness import RUN, beginning, frame, moved, packed, site, update_for, write_plan
from tests.edge_server.processes import PATIENCE_S, TINY, forked, until
from tests.naming import log_messages, names_all

pytestmark = pytest.mark.virtual_time

LARGE = 'name = "mlp"\noptions = { hidden = 2000 }'


async def test_an_update_that_does_not_fit_waits_on_its_device(tmp_path, disk, caplog):
    """No word to it but to offer again later; the round goes on for the others, and counts what it did without."""
    async with site(disk.path, rounds=1, model=LARGE, round="deadline_s = 100.0") as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        disk.fill(leave_bytes=100_000)
        room = disk.free_bytes
        for _ in range(2):
            await one.say(update)
            await asyncio.sleep(1)
            for index in range(update.params.blocks):
                await one.say(frame(update.params, index, data))
            await asyncio.sleep(19)
            assert disk.free_bytes == room, "half of it takes room"
            assert all(isinstance(wire.decode(said), Want) for _, said in one.acks.drain()), "it was settled"
        assert not here.run.done()
        disk.make_room()
        assert (await one.offer(update, data)).verdict == "accepted"
        assert (await two.answer(await two.task(), moved(here.plan, 0.5))).verdict == "accepted"
        state, rounds = await here.ended()
        for key, first in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], first + 0.5, rtol=0, atol=1e-6)
        [closed] = rounds
    assert closed.arrived == ("one", "two")
    assert closed.refused == {"disk": 2}
    [message] = log_messages(caplog, "one", os.strerror(errno.ENOSPC))
    assert re.search(r"\b0\.\d MiB", message)


async def test_no_deadline_runs_while_the_disk_takes_no_update(disk, caplog):
    """The devices cannot help it: when there is room, their updates are taken in the very same round."""
    async with site(disk.path, rounds=1, model=LARGE, round="deadline_s = 30.0") as here:
        here.store.retry_s = 3.0
        boards = [await here.device(name) for name in ("one", "two")]
        data = packed(moved(here.plan, 0.5))
        updates = [update_for(await board.task(), data) for board in boards]
        disk.fill(leave_bytes=200_000)
        for board, update in zip(boards, updates, strict=True):
            await board.say(update)
        await asyncio.sleep(29)
        disk.fill()
        await asyncio.sleep(100)
        assert not here.run.done()
        disk.make_room()
        for board, update in zip(boards, updates, strict=True):
            assert (await board.offer(update, data)).verdict == "accepted"
        [closed] = (await here.ended())[1]
    assert (closed.outcome, closed.arrived) == ("aggregated", ("one", "two"))
    assert len([one for one in caplog.records if one.name == quorum.__name__]) == 1


async def test_an_update_that_cannot_be_recorded_is_not_acknowledged(disk, caplog):
    """Its bytes are here, the journal's line is not: it does not count, and is taken when it is offered again."""
    async with site(disk.path, rounds=1, evaluation="every = 0", round="deadline_s = 100.0") as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        (disk.path / RUN / "updates").mkdir()
        (disk.path / RUN / "updates" / "one").write_bytes(bytes(len(data)))  # as of a round before
        disk.fill()
        await one.say(update)
        for index in range(update.params.blocks):
            await one.say(frame(update.params, index, data))
        await asyncio.sleep(5)
        assert not [record for record in here.store.records() if isinstance(record, UpdateAccepted)]
        assert all(isinstance(wire.decode(said), Want) for _, said in one.acks.drain()), "it was settled"
        disk.make_room()
        assert (await one.offer(update, data)).verdict == "accepted"
        await two.answer(await two.task(), moved(here.plan, 0.5))
        accepted = [record.device for record in here.store.records() if isinstance(record, UpdateAccepted)]
        [closed] = (await here.ended())[1]
    assert accepted == ["one", "two"]
    assert closed.refused == {"disk": 1}


@pytest.mark.parametrize("full", ["as a round opens", "as a round closes"])
async def test_a_run_waits_for_room_and_goes_on(disk, caplog, full):
    """Without a round, an update or a bit lost; it says once what to do, and once that it was done."""
    async with site(disk.path, rounds=2) as here:
        here.store.retry_s = 3.0
        opens = full == "as a round opens"
        if opens:
            disk.fill()
        else:
            here.store.extend = refusing(disk, here.store)
        one, two = await here.device("one"), await here.device("two")
        if opens:
            await asyncio.sleep(100)
            assert not [*one.tasks.drain()]
            disk.make_room()
        for puppet in (one, two):
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        if not opens:
            await asyncio.sleep(100)
            assert not [*one.tasks.drain()]
            disk.make_room()
        for puppet in (one, two):
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        state, rounds = await here.ended()
        for key, first in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], first + 1.0, rtol=0, atol=1e-6)
    assert [closed.arrived for closed in rounds] == [("one", "two")] * 2
    assert len(log_messages(caplog, os.strerror(errno.ENOSPC), "3 s")) == 1


def refusing(disk, store: SqliteStore):
    """Return an `extend` that fills the disk once the second update of a round is recorded."""
    extend, came = store.extend, []

    def after(records, *payloads, **options) -> None:
        extend(records, *payloads, **options)
        came.extend(record for record in records if isinstance(record, UpdateAccepted))
        if len(came) == 2:
            store.extend = extend
            disk.fill()

    return after


def test_a_server_that_waits_for_room_ends_when_told(disk, tmp_path):
    """As a process: SIGTERM in the middle of the wait ends it with 0, and it has said what to do, in one line."""
    write_plan(tmp_path, rounds=1, **TINY)
    log, path = tmp_path / "log", tmp_path / "server.json"
    path.write_text(
        json.dumps(
            {"plan": "plan.toml", "site": "lab", "run": RUN, "data_dir": str(disk.path), "data_root": str(tmp_path)}
        )
    )
    disk.fill()
    with forked("run", "--config", path, log=log) as server:
        until(lambda: names_all(log.read_text(), f"{disk.path}/formats.json"), "it waits")
        server.terminate()
        assert server.wait(PATIENCE_S) == 0
    told = log.read_text()
    assert len([line for line in told.splitlines() if names_all(line, f"{disk.path}/formats.json", "0.0 MiB")]) == 1
    assert names_all(told.splitlines()[-1], f"edge-server run --config {path}", RUN)
