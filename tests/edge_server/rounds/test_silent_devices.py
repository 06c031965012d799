"""Silent devices cost a few deadlines; responsive ones stay in."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from edge_server.fleet import silent_devices
from edge_server.fleet.silent_devices import FIRST_PROBE, SILENT_ROUNDS, SilentDevices
from edge_server.fleet.state import Fleet
from edge_server.journal.records import AnyRecord, LeftOut, RoundOpened, closed_rounds
from edge_server.trial.tables import failure_lines, rounds_table
from shared.protocol.messages import Report, Status, Want
from shared.runtime.executor import background
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import Puppet, Site, moved, site, virtual
from tests.naming import log_messages, names_all

pytestmark = pytest.mark.virtual_time

DEADLINE_S = 30.0
ROUND = f"deadline_s = {DEADLINE_S}"


async def serve(here: Site, puppet: Puppet) -> None:
    """Do every task."""
    while True:
        task = await puppet.task()
        await asyncio.sleep(1)
        await puppet.answer(task, moved(here.plan, 0.01))


async def report(puppet: Puppet, every_s: float) -> None:
    """Report, and do nothing else."""
    clock = asyncio.get_running_loop().time
    while True:
        await puppet.say(Report(device=puppet.name, at=clock(), instance=puppet.name), "report")
        await asyncio.sleep(every_s)


async def until_round(here: Site, number: int) -> None:
    """Wait until a round begins."""
    while not any(isinstance(one, RoundOpened) and one.round == number for one in here.store.records()):
        assert not here.run.done()
        await asyncio.sleep(0.1)


def asked(records: list[AnyRecord], device: str) -> list[int]:
    return [one.round for one in records if isinstance(one, RoundOpened) and device in one.assignments]


def delayed(records: list[AnyRecord]) -> list[int]:
    return [one.round for one in closed_rounds(records) if one.seconds > DEADLINE_S / 2]


async def test_a_silent_member_delays_some_rounds_and_no_more(tmp_path, caplog):
    """It was waited for in every round, to the deadline; now it is asked rarely, and not waited for."""
    rounds = SILENT_ROUNDS + 2 + FIRST_PROBE
    async with site(tmp_path, rounds=rounds, round=ROUND) as here:
        await here.device("silent")
        async with background(serve(here, await here.device("good"))):
            await here.ended()
        records = here.store.records()
    assert delayed(records) == list(range(1, SILENT_ROUNDS + 1))
    assert asked(records, "silent") == [*range(1, SILENT_ROUNDS + 1), SILENT_ROUNDS + FIRST_PROBE + 1]
    [out] = [one for one in records if isinstance(one, LeftOut)]
    assert (out.device, out.round, out.silent) == ("silent", SILENT_ROUNDS, True)
    assert log_messages(caplog, "silent", out.cause)
    [line] = failure_lines(records)
    assert names_all(line, "silent", SILENT_ROUNDS, out.cause)
    assert [row[2] for row in rounds_table(records).rows].count("silent (silent)") == 1


@pytest.mark.parametrize("word", ["report", "want", "birth", "again"])
async def test_a_silent_device_that_speaks_takes_part_again(tmp_path, word, caplog):
    words = {
        "report": Report(device="silent", at=9.0, instance="silent"),
        "want": Want(digest=bytes(16), frame_bytes=1024, ranges=[(0, 1)]),
        "birth": Status(device="silent", session=1, instance="anew", online=True),
        "again": Status(device="silent", session=2, instance="silent", online=True),
    }
    caplog.set_level("INFO")
    async with site(tmp_path, rounds=9, round=ROUND) as here:
        silent = await here.device("silent")
        await silent.say(Report(device="silent", at=1.0, instance="silent"), "report")
        async with background(serve(here, await here.device("good"))):
            await until_round(here, SILENT_ROUNDS + 3)
            assert asked(here.store.records(), "silent") == [1, 2, 3]
            while list(silent.tasks.drain()):
                pass
            await silent.say(words[word], "want" if word == "want" else "report" if word == "report" else "status")
            async with background(serve(here, silent)):
                await here.ended()
        records = here.store.records()
    assert asked(records, "silent") == [1, 2, 3, 7, 8, 9]
    assert delayed(records) == [1, 2, 3]
    assert [one.args for one in caplog.records if one.name == silent_devices.__name__] == [("silent",)]
    assert failure_lines(records) == []


async def test_a_device_that_reports_and_is_late_is_asked_on(tmp_path):
    """It is slow, not silent: the plan's quorum and over-selection are for it."""
    async with site(tmp_path, rounds=8, round=ROUND) as here:
        slow = await here.device("slow")
        async with background(serve(here, await here.device("good")), report(slow, DEADLINE_S * 0.9)):
            await here.ended()
        records = here.store.records()
    assert asked(records, "slow") == list(range(1, 9))
    assert not [one for one in records if isinstance(one, LeftOut)]


async def test_a_word_that_comes_while_others_are_still_given_their_tasks_counts(tmp_path):
    """On a broker that takes its time; the device asks for the model and then trains beyond every deadline."""

    class Slow(MemoryTransport):
        async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
            await super().publish(topic, payload, retain=retain, assured=assured)
            await asyncio.sleep(1.0 * topic.endswith("/task"))

    async def ask(puppet: Puppet) -> None:
        while True:
            task = await puppet.task()
            await puppet.say(Want(digest=task.params.digest, frame_bytes=1024, ranges=[(0, 1)]), "want")

    async with site(tmp_path, Slow(), rounds=8, round=ROUND) as here:
        slow = await here.device("a-slow")
        async with background(serve(here, await here.device("good")), ask(slow)):
            await here.ended()
        assert asked(here.store.records(), "a-slow") == list(range(1, 9))


async def test_a_silent_device_that_answers_takes_nobodys_place(tmp_path):
    """It is asked again in this round, speaks, and is first: the round waits for the other one all the same."""
    number = SILENT_ROUNDS + FIRST_PROBE + 1
    async with site(tmp_path, rounds=number, round=ROUND) as here:
        silent = await here.device("silent")
        async with background(serve(here, await here.device("good"))):
            await until_round(here, number)
            *_, task = [await silent.task() for _ in range(SILENT_ROUNDS + 1)]
            await silent.answer(task, moved(here.plan, 0.01))
            assert (await here.ended())[1][-1].arrived == ("good", "silent")


async def test_short_deadlines_leave_out_nobody_before_it_could_have_reported(tmp_path):
    async with site(tmp_path, rounds=20, round="deadline_s = 2.0") as here:
        slow = await here.device("slow")
        async with background(serve(here, await here.device("good")), report(slow, 30.0)):
            await here.ended()
        assert asked(here.store.records(), "slow") == list(range(1, 21))


async def test_nobody_is_left_out_where_a_round_needs_it(tmp_path):
    """Two updates are needed of two devices: the round waits for both, and is done again until both have come."""
    rule = f"{ROUND}\nmin_updates = 2"
    async with site(tmp_path, rounds=1, round=rule, started="2026-11-23") as here:
        silent = await here.device("silent")
        async with background(serve(here, await here.device("good"))):
            await asyncio.sleep(20 * DEADLINE_S)
            async with background(serve(here, silent)):
                assert (await here.ended())[1][-1].arrived == ("good", "silent")


def test_a_restarted_server_remembers_who_was_silent(tmp_path):
    """What the broker has retained of it, its birth and its last report, is no word of it."""

    async def play() -> list[AnyRecord]:
        broker = MemoryTransport()
        for first in (True, False):
            async with site(tmp_path, broker, rounds=8, round=ROUND) as here:
                silent = await here.device("silent", online=first)
                async with background(serve(here, await here.device("good"))):
                    if first:
                        await until_round(here, SILENT_ROUNDS + 3)
                    else:
                        await silent.status(online=True)
                        await silent.say(Report(device="silent", at=1.0, instance="silent"), "report")
                        await here.ended()
                        return here.store.records()
        raise AssertionError

    records = virtual(play())
    assert asked(records, "silent") == [1, 2, 3]
    assert delayed(records) == [1, 2, 3]


def test_probes_become_rarer():
    fleet, silent, asked = Fleet(), SilentDevices(), []
    for name in ("a", "b"):
        fleet.observe(Status(device=name, session=1, instance="test", online=True))
    for number in range(1000):
        devices = silent.skip_silent(fleet, ["a", "b"])
        asked += [number] * ("b" in devices)
        silent.begin(fleet, devices, 100.0 * number)
        waits = set(devices) - silent.find_silent(fleet, devices)
        silent.count_miss(fleet, waits - {"a"}, 100.0 * number + 99)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps == [1, 1, 17, 33, 65, 129, 257, 257]
