"""A run's journal has what of the devices' words a trace needs: no more, and all of it."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.fleet.observe import BATCH_S, GRACE_S, MOST, SETTLE_S, Observer
from edge_server.fleet.report_changes import PAUSE_S, filter_report
from edge_server.journal import sqlite
from edge_server.journal.records import Joined, Left, RoundOpened, RunClosed, Sensed, ServerBegan, UpdateAccepted
from edge_server.journal.stream import decode_row, row_mark
from shared.errors import Unwritable
from shared.protocol.measurements import Cost, Provenance, Reading, TaskCost
from shared.protocol.messages import Report, Status
from tests.edge_server.harness import RUN, moved, site, virtual
from tests.naming import log_messages

pytestmark = pytest.mark.virtual_time


def report(at: float, watts: float = 5.0, **changes: object) -> Report:
    """Return what a board says at a moment."""
    readings = {
        "power.total_watts": Reading(value=watts, unit="W", source="ina3221", quality="measured", at=at),
        "throttle.now_flag": Reading(value=0.0, unit="1", source="soc", quality="measured", at=at),
        "disk.free_bytes": Reading(value=1e9, unit="B", source="statvfs", quality="measured", at=at),
    }
    known = {"device": "a", "at": at, "board": "orin", "readings": readings, "facts": {"mode": "15W", "serial": "7"}}
    return Report(**{**known, **changes})


def told(*reports: tuple[float, Report]) -> list[Sensed]:
    """Return what is recorded of reports heard at moments."""
    found, known = [], None
    for at, one in reports:
        if news := filter_report(one, known, at):
            record, known = news
            found.append(record)
    return found


def test_a_first_report_is_told_with_its_sources_and_nothing_that_no_trace_needs():
    [record] = told((100.0, report(7.0)))
    assert record == Sensed(
        device="a",
        at=100.0,
        readings={"power.total_watts": 5.0, "throttle.now_flag": 0.0},
        provenance={
            "power.total_watts": Provenance(source="ina3221", quality="measured"),
            "throttle.now_flag": Provenance(source="soc", quality="measured"),
        },
        board="orin",
        facts={"mode": "15W"},
    )


def test_what_has_been_told_is_not_told_again():
    """Sources, board and facts neither, when a figure is."""
    first, second = told((0.0, report(1.0)), (10.0, report(11.0)), (20.0, report(21.0, watts=6.0)))
    assert second == Sensed(device="a", at=20.0, readings={"power.total_watts": 6.0, "throttle.now_flag": 0.0})
    assert first.provenance


def flagged(at: float) -> Report:
    one = report(at)
    flag = Reading(value=1.0, unit="1", source="soc", quality="measured", at=at)
    return report(at, readings={**one.readings, "throttle.now_flag": flag})


@pytest.mark.parametrize(
    ("later", "is_told"),
    [
        (report(2.0, watts=5.2), False),  # 4 %
        (report(2.0, watts=5.3), False),  # 6 %, but less than 5 s after the last
        (report(2.0, facts={"mode": "MAXN"}), True),
        (report(2.0, board="nano"), True),
        (report(2.0, readings={}), True),  # its sensor is gone
        (flagged(2.0), True),
        (report(2.0, spent=TaskCost(run="r", round=1, cost=Cost())), True),  # a task ended
    ],
)
def test_what_is_news_at_once(later, is_told):
    assert len(told((0.0, report(1.0)), (PAUSE_S / 2, later))) == 1 + is_told


def test_a_figure_that_moves_is_told_after_a_pause():
    """However fast a device reports, so that a journal is bounded by its run's length."""
    many = [(0.1 * step, report(float(step), watts=5.0 + step)) for step in range(201)]
    assert [one.at for one in told(*many)] == pytest.approx([0.0, 5.0, 10.0, 15.0, 20.0])


def test_what_cannot_be_true_is_left_out_and_what_is_old_says_so():
    one = report(50.0)
    odd = {
        "power.total_watts": Reading(value=float("nan"), unit="W", source="x", quality="measured", at=50.0),
        "cpu.f_hertz": Reading(value=-1.0, unit="Hz", source="x", quality="measured", at=50.0),
        "thermal.hottest_celsius": Reading(value=-4.0, unit="°C", source="x" * 999, quality="measured", at=50.0),
        "link.up_bits_per_s": Reading(value=5e6, unit="bit/s", source="outbox", quality="measured", at=20.0),
    }
    [record] = told((3.0, report(50.0, readings=odd)))
    assert record.readings == {"thermal.hottest_celsius": -4.0, "link.up_bits_per_s": 5e6}
    assert record.ages == {"link.up_bits_per_s": 30.0}
    assert len(record.provenance["thermal.hottest_celsius"].source) == 64
    assert one.readings


def test_an_age_that_no_journal_can_hold_is_left_out():
    """As JSON an infinite number is none at all, and a journal that holds one cannot be read any more."""
    odd = Reading(value=1.0, unit="W", source="x", quality="measured", at=-1e308)
    [record] = told((3.0, report(1e308, readings={"power.total_watts": odd})))
    body = sqlite.encode(record)
    assert decode_row((1, body, row_mark(body, 0), 0)) == record
    assert record.ages == {}


def test_a_device_that_measures_nothing_is_not_told_of():
    """As most replayed ones: a fleet of ten thousand costs nothing."""
    assert told((0.0, Report(device="a", at=1.0))) == []


def status(instance: str, session: int, *, online: bool = True) -> Status:
    return Status(device="a", session=session, instance=instance, online=online, version="0.1.0")


async def test_comings_and_goings_tell_a_new_process_from_a_new_connection():
    written: list = []

    async def extend(batch) -> None:
        written.append(list(batch))

    clock = asyncio.get_running_loop().time
    observer = Observer(clock, extend)
    keeping = asyncio.create_task(observer.write_batches())
    words = [status("x", 1), status("x", 2), status("x", 2, online=False), status("y", 3)]
    for word in [*words, status("y", 3, online=False), status("y", 3, online=False)]:
        observer.record_status(word)
    await asyncio.sleep(2 * BATCH_S)
    assert len(written) == 1, "one write for all of a second"
    observer.record_status(status("y", 4))
    begun = clock()
    await observer.flush()
    assert clock() == begun, "the end of a run waits for no batch"
    keeping.cancel()
    assert [(type(one), getattr(one, "cause", "")) for batch in written for one in batch] == [
        (Joined, "connected"),
        (Joined, "reconnected"),
        (Left, "gone"),
        (Joined, "restarted"),
        (Left, "gone"),
        (Joined, "reconnected"),
    ]


async def test_a_full_disk_loses_no_word_and_a_run_does_not_wait_for_words(caplog):
    """They are tried again; more than ten thousand are lost, which the log says once."""
    full, written = True, []

    async def extend(batch) -> None:
        if full:
            raise Unwritable("full")
        written.extend(batch)

    clock = asyncio.get_running_loop().time
    observer = Observer(clock, extend)
    keeping = asyncio.create_task(observer.write_batches())
    observer.record_status(status("x", 1))
    await observer.flush()
    assert clock() == SETTLE_S
    for number in range(MOST + 10):
        observer.record_status(Status(device=f"x-{number}", session=1, instance="x", online=True))

    full = False
    await observer.flush()
    keeping.cancel()
    assert len(written) == MOST + 1
    assert not caplog.records, "nothing was lost"


async def test_a_run_records_who_came_what_was_measured_and_when(tmp_path):
    """In its journal, before its end is; who leaves while the server is away is told by the next one."""
    async with site(tmp_path, rounds=1) as here:
        one, other = await here.device("a"), await here.device("b")
        await one.say(report(1.0), "report")
        await one.answer(await one.task(), moved(here.plan, 0.5))
        whole = TaskCost(run=RUN, round=1, cost=Cost())  # so that the run's end waits for nothing else
        await one.say(report(2.0, facts={"mode": "MAXN"}, spent=whole), "report")
        await other.answer(await other.task(), moved(here.plan, 0.5))
        await here.run
        records = here.store.records()
    kinds = [type(one) for one in records]
    assert kinds[1] is ServerBegan
    assert kinds[-1] is RunClosed
    assert [one.device for one in records if isinstance(one, Joined)] == ["a", "b"]
    assert [one.facts for one in records if isinstance(one, Sensed)] == [{"mode": "15W"}, {"mode": "MAXN"}]
    [opened] = [one for one in records if isinstance(one, RoundOpened)]
    assert opened.online == 2
    arrivals = [one.at for one in records if isinstance(one, UpdateAccepted)]
    assert all(at is not None and at >= opened.at for at in arrivals)
    assert records[1].versions.keys() >= {"python", "torch"}
    assert records[1].utc_s is None, "a replay has no calendar"


def test_who_left_while_the_server_was_away_is_told(tmp_path):
    """By the next process of the server, to which every device connects anew."""

    async def serve(names: str):
        async with site(tmp_path, rounds=3) as here:
            devices = [await here.device(name) for name in names]
            await devices[0].task()
            await asyncio.sleep(GRACE_S)
            await here.device("d")
            await asyncio.sleep(2 * BATCH_S)
            return here.store.records()

    virtual(serve("ab"))
    records = virtual(serve("ac"))
    assert [one.run_s for one in records if isinstance(one, ServerBegan)] == [0.0, 10.0]
    seen = [(one.device, type(one), one.cause) for one in records if isinstance(one, Joined | Left)]
    assert seen == [
        ("a", Joined, "connected"),
        ("b", Joined, "connected"),
        ("d", Joined, "connected"),
        ("a", Joined, "connected"),
        ("c", Joined, "connected"),
        ("b", Left, "unheard"),
        ("d", Left, "unheard"),
        ("d", Joined, "connected"),
    ]


def test_a_device_that_never_stops_talking_does_not_fill_the_disk(caplog):
    """Ten words a second for an hour: a first 600 and then one in two seconds, said once; another device is heard."""
    now = 0.0

    async def extend(batch) -> None:
        raise AssertionError("nobody writes here")

    observer = Observer(lambda: now, extend)
    for number in range(36_000):
        now = number / 10
        if number % 2:
            observer.record_status(Status(device="a", session=number, instance="x", online=number % 4 == 1))
        else:
            observer.record_report(report(now, facts={"mode": str(number)}))
    observer.record_report(report(now, device="b"))
    heard = [observer.pending.get_nowait() for _ in range(observer.pending.qsize())]
    assert 600 + 0.9 * 1800 < len(heard) < 600 + 1800 + 10
    assert heard[-1].device == "b"
    assert len(log_messages(caplog, "a", level="WARNING")) == 1
