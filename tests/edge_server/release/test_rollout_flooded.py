"""A board of the site, with a certificate, says what it likes: the others take their release, the disk stays free."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest

from edge_server.journal.rollouts.file import BoardReported, read_rollout
from edge_server.release.rollout.board_reports import STATUS_BURST
from shared.protocol import wire
from shared.protocol.inference.rollout import ModelStatus, Releases
from shared.protocol.topics import topic
from tests.edge_server.release.boards import SITE
from tests.edge_server.release.test_rollout import Site
from tests.fuzz import wires
from tests.fuzz.trees import cut_and_spliced, damaged
from tests.naming import log_messages

pytestmark = pytest.mark.virtual_time

BAD = "pi-00"
CHANNELS = {"Status": "status", "Report": "report", "Lacks": "lacks", "Want": "lacks", "Releases": "release"}


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@asynccontextmanager
async def saying(site, words):
    """Have the bad board say things, as it goes on with all else, while the block lasts."""

    async def say():
        for channel, data in words:
            await site.transport.publish(topic(SITE, BAD, channel), data)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(say())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(site, known, device):
    records = read_rollout(site.data_dir, known.state.plan.deployment)
    return [one for one in records if isinstance(one, BoardReported) and one.device == device]


async def test_a_board_that_says_another_thing_all_the_time_fills_no_journal(tmp_path, caplog):
    """Each of its words is news: thousands come; and what is recorded of it is what an accident explains."""

    def words():
        for number in range(1_000_000):
            status = ModelStatus(name="net", state="trial", attempt=1 + number % 2, reason=f"{number} {'x' * 400}")
            yield "release", wire.encode(Releases(device=BAD, instance="bad", models=(status,)))

    site = Site(tmp_path, 4)
    async with site.awake(), saying(site, words()):
        known = await site.roll_out(site.release(), canary=0, waves=(1.0,), max_failures=4)
    assert {device: version for device, version in site.versions().items() if device != BAD} == dict.fromkeys(
        ("pi-01", "pi-02", "pi-03"), 1
    )
    assert 1 < len(told(site, known, BAD)) <= STATUS_BURST + 40
    assert len(log_messages(caplog, BAD, level="WARNING")) == 1
    assert max(len(told(site, known, device)) for device in site.boards if device != BAD) < 12


def evil(random, seeds, deployment):
    """Yield mutated messages of the bad board, most of which can be read."""
    while True:
        tree = msgspec.msgpack.decode(random.choice(seeds)[3:])
        kept = {"type": tree["type"], **({"device": BAD} if "device" in tree else {})}
        kept |= {"deployment": deployment} if "deployment" in tree and random.random() < 0.8 else {}
        changed = damaged(tree, random)
        tree = changed | kept if isinstance(changed, dict) and random.random() < 0.95 else changed
        try:
            data = b"FM\x01" + msgspec.msgpack.encode(tree)
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
        data = cut_and_spliced(data, random) if random.random() < 0.05 else data
        usual = CHANNELS[kept["type"]]
        yield usual if random.random() < 0.9 else random.choice([*CHANNELS.values()]), data


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_board_says_the_others_take_their_release(tmp_path, virtually, seed):
    logging.getLogger("edge_server").setLevel(logging.ERROR)
    golden = wires.seeds()
    seeds = [data for data in golden if _kind(data) in CHANNELS]

    async def routine():
        site = Site(tmp_path, 4)
        async with site.awake(), saying(site, evil(Random(seed), seeds, "any")):
            await site.roll_out(site.release(), canary=0, waves=(1.0,), max_failures=4)
        return site.versions()

    try:
        versions = virtually(routine())
    finally:
        logging.getLogger("edge_server").setLevel(logging.NOTSET)
    assert {versions[device] for device in ("pi-01", "pi-02", "pi-03")} == {1}


def _kind(data: bytes) -> str:
    try:
        return msgspec.msgpack.decode(data[3:])["type"]
    except (ValueError, KeyError):
        return ""
