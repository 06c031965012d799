"""Rollouts in virtual time: real engine, exchange and stores."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.rollouts.file import PartsSent, RolloutOrdered, RolloutPlan, WaveOpened, read_rollout
from edge_server.release.rollout.engine import RolloutEngine
from edge_server.release.rollout.link import RolloutLink, RolloutOptions
from edge_server.release.rollout.orders import LoadedRollout, begin_rollout, boards_using, give_order, open_rollout
from edge_server.release.rollout.tables import heading_lines
from edge_server.release.store import StoredRelease, find_release, publish
from shared.errors import ConfigError
from shared.protocol import wire
from shared.protocol.inference.release import PARAMETERS, ReleaseManifest
from shared.protocol.messages import Report, Status
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.transport.memory import MemoryTransport
from tests.edge_server.release.boards import SITE, FieldBoard, make_release
from tests.naming import names_all, naming

pytestmark = pytest.mark.virtual_time

TERMS = RolloutPlan(deployment="", release="", sha256="", soak_s=30.0)
DRAW = random.Random(7)
LAYERS = {f"layer{number}": DRAW.randbytes(20_000) for number in range(5)}


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch):
    """Nobody cuts the power of this machine; a journal and twenty stores would wait for its disk."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


class Site:
    """A gateway's folder, a broker, and boards."""

    def __init__(self, folder: Path, count: int, profiles: Sequence[str] = ("pi-4",)) -> None:
        self.data_dir, self.transport = folder / "runs", MemoryTransport()
        self.boards = {
            name: FieldBoard(name, self.transport, folder / name, profiles[number % len(profiles)])
            for number, name in enumerate(f"pi-{one:02d}" for one in range(count))
        }

    @asynccontextmanager
    async def awake(self, *, without: Sequence[str] = ()) -> AsyncIterator[None]:
        """Have boards live while the block lasts."""
        try:
            for name, board in self.boards.items():
                if name not in without:
                    await board.switch_on()
            yield
        finally:
            for board in self.boards.values():
                await board.switch_off()

    def release(self, **changed: bytes) -> StoredRelease:
        return make_release(self.data_dir, {**LAYERS, **changed})

    def engine(self, known: LoadedRollout, **options: object) -> RolloutEngine:
        """Return a process that drives a rollout, as it starts."""
        stored = find_release(self.data_dir, known.state.plan.release)
        loop = asyncio.get_running_loop()
        link = RolloutLink(SITE, self.transport, loop.time, inline, stored, 4096, 1.0)
        return RolloutEngine(known, link, RolloutOptions(**options))

    async def roll_out(self, stored: StoredRelease, **terms: object) -> LoadedRollout:
        """Roll a release out to its end."""
        known = begin_rollout(self.data_dir, stored, msgspec.structs.replace(TERMS, **terms))
        async with asyncio.timeout(3600):
            await self.engine(known).run()
        return known

    def versions(self) -> dict[str, int]:
        return {name: board.record().committed for name, board in self.boards.items()}


def sent(known: LoadedRollout, data_dir: Path) -> list[PartsSent]:
    return [one for one in read_rollout(data_dir, known.state.plan.deployment) if isinstance(one, PartsSent)]


def shown(known: LoadedRollout) -> str:
    """Return what people are told above the table of boards."""
    return "\n".join(heading_lines(known.state))


async def until(condition: Callable[[], bool]) -> None:
    """Wait in virtual time; a minute of it is more than anything here takes but a soak."""
    async with asyncio.timeout(600):
        while not condition():  # noqa: ASYNC110 - virtual seconds
            await asyncio.sleep(0.05)


async def test_a_release_goes_to_all_wave_by_wave_and_is_recorded(tmp_path):
    site = Site(tmp_path, 6, ("pi-3", "pi-4"))
    async with site.awake():
        known = await site.roll_out(site.release())
        assert known.state.outcome == "finished"
        assert set(site.versions().values()) == {1}
        records = read_rollout(site.data_dir, known.state.plan.deployment)
        waves = [one for one in records if isinstance(one, WaveOpened)]
        assert [(len(one.devices), one.canary) for one in waves] == [(2, True), (1, False), (3, False)]
        assert set(waves[0].devices.values()) == {"pi-3", "pi-4"}
        assert boards_using(site.data_dir, "net/1") == sorted(site.boards)


async def test_parts_go_once_for_all_who_lack_the_same_and_only_those_that_changed(tmp_path):
    site = Site(tmp_path, 20)
    async with site.awake():
        first = await site.roll_out(site.release(), canary=0, waves=(1.0,))
        [whole] = sent(first, site.data_dir)
        assert len(whole.devices) == 20
        assert whole.sent < 1.05 * whole.size
        second = await site.roll_out(site.release(layer2=DRAW.randbytes(20_000)), canary=0, waves=(1.0,))
        [changed] = sent(second, site.data_dir)
        assert 20_000 < changed.size < 21_000, "a layer and the header of the file that it is in"
        assert changed.sent < 1.05 * changed.size
        assert set(site.versions().values()) == {2}
        again = await site.roll_out(make_release(site.data_dir, LAYERS, "other"), canary=0, waves=(1.0,))
        assert sent(again, site.data_dir) == [], "another name, and the same content is here"
        assert {board.record("other").committed for board in site.boards.values()} == {1}


@pytest.mark.parametrize(
    ("knows", "first"),
    [
        ("its report of before", {"pi-00": "pi-4"}),
        ("nothing, for a while", {"pi-00": "pi-4"}),
        ("nothing", {"pi-00": "", "pi-01": "pi-4"}),
    ],
)
async def test_a_board_that_has_just_begun_is_no_canary_beside_that_of_its_profile(tmp_path, knows, first):
    """Its report comes after its birth: what the broker has retained is of the process before, or there is nothing."""
    site, way = Site(tmp_path, 4), topic(SITE, "pi-00", "report")
    born = Status(device="pi-00", session=9, instance="new", online=True)
    async with site.awake():
        await asyncio.sleep(1)
        await site.transport.publish(topic(SITE, "pi-00", "status"), wire.encode(born), retain=True)
        if knows != "its report of before":
            await site.transport.publish(way, b"", retain=True)
        rolling = asyncio.create_task(site.roll_out(site.release()))
        if knows == "nothing, for a while":
            await asyncio.sleep(3)
            report = Report(device="pi-00", at=9.0, board="pi-4", instance="new")
            await site.transport.publish(way, wire.encode(report), retain=True)
        known = await rolling
        assert known.state.outcome == "finished"
        assert [known.state.waves[number] for number in known.state.canaries] == [first]


@pytest.mark.parametrize("ahead", [True, False])
async def test_parts_go_once_for_all_waves_since_later_ones_fetch_with_the_first(tmp_path, ahead):
    site = Site(tmp_path, 20)
    async with site.awake():
        first = await site.roll_out(site.release(), ahead=ahead)
        assert len(first.state.waves) == 4
        size = sum(part.size for part in find_release(site.data_dir, "net/1").manifest.parts.values())
        times = 1 if ahead else 4
        assert times * size < first.state.sent < 1.05 * times * size
        second = await site.roll_out(site.release(layer2=DRAW.randbytes(20_000)), ahead=ahead)
        assert times * 20_000 < second.state.sent < 1.05 * times * 21_000
        assert set(site.versions().values()) == {2}


@pytest.mark.virtual_time
async def test_what_is_fetched_ahead_is_tried_by_nobody_and_gone_when_the_first_board_refuses_it(tmp_path):
    def rule(manifest: ReleaseManifest) -> str:
        return "worse: accuracy fell by 0.3" if manifest.version == 2 else ""

    site = Site(tmp_path, 4)
    for board in site.boards.values():
        board.rule = rule
    async with site.awake():
        await site.roll_out(site.release())
        stored, later = site.release(layer1=b"\0" * 20_000), [site.boards[f"pi-0{one}"].store for one in (1, 2, 3)]
        terms = msgspec.structs.replace(TERMS, on_failure="back")
        known = begin_rollout(site.data_dir, stored, terms)
        driving = asyncio.create_task(site.engine(known).run())
        await until(lambda: site.boards["pi-00"].record().phase == "trial")
        await until(lambda: not any(one.parts.missing(stored.manifest) for one in later))
        assert [one.ahead() for one in later] == [stored.manifest] * 3
        assert {one.record("net").candidate for one in later} == {1}
        await site.boards["pi-01"].switch_off()
        await site.boards["pi-01"].switch_on()
        await driving
        assert known.state.outcome == "taken-back"
        await until(lambda: not any(one.ahead() for one in later))
        assert all(set(one.parts.missing(stored.manifest)) == {PARAMETERS} for one in later)
        assert set(site.versions().values()) == {1}


@pytest.mark.virtual_time
async def test_an_offer_finds_what_is_being_fetched_ahead_and_another_release_takes_its_place(tmp_path):
    """A slow board goes on with its download when its wave comes; where the rollout was ended, it fetches another."""
    site = Site(tmp_path, 3)
    site.boards["pi-02"].says_each_s = 5.0
    async with site.awake():
        known = await site.roll_out(site.release(), soak_s=1.0)
        size = sum(part.size for part in find_release(site.data_dir, "net/1").manifest.parts.values())
        assert (known.state.outcome, set(site.versions().values())) == ("finished", {1})
        assert known.state.sent < 2.1 * size, "its own frames once, beside those for the others"
        known = begin_rollout(site.data_dir, site.release(layer1=b"\7" * 20_000), TERMS)
        driving = asyncio.create_task(site.engine(known).run())
        await until(lambda: site.boards["pi-02"].store.ahead() is not None)
        give_order(open_rollout(site.data_dir), "abort")
        await driving
        await until(lambda: site.boards["pi-02"].store.ahead() is None)
        last = await site.roll_out(site.release(layer1=b"\6" * 20_000))
        assert (last.state.outcome, site.versions()["pi-02"]) == ("finished", 3)
        assert site.boards["pi-02"].store.ahead() is None


@pytest.mark.parametrize("reason", ["finite: NaN in layer1", "worse: accuracy fell by 0.3"])
async def test_a_bad_release_stops_at_the_canary_and_is_taken_back(tmp_path, reason):
    def rule(manifest: ReleaseManifest) -> str:
        return reason if manifest.version == 2 else ""

    site = Site(tmp_path, 4)
    for board in site.boards.values():
        board.rule = rule
    async with site.awake():
        await site.roll_out(site.release())
        known = await site.roll_out(site.release(layer1=b"\0" * 20_000), on_failure="back")
        assert known.state.outcome == "taken-back"
        assert reason in known.state.cause
        assert list(known.state.offered_boards) == ["pi-00"]
        assert set(site.versions().values()) == {1}
        assert boards_using(site.data_dir, "net/2") == []


async def test_failures_later_take_back_the_boards_that_have_committed_it(tmp_path):
    site = Site(tmp_path, 4)
    site.boards["pi-02"].rule = lambda manifest: "latency: 9 ms" if manifest.version == 2 else ""
    async with site.awake():
        await site.roll_out(site.release())
        known = await site.roll_out(site.release(layer1=b"\1" * 20_000), on_failure="back")
        assert known.state.outcome == "taken-back"
        assert known.state.failures["pi-02"] == "latency: 9 ms"
        assert set(site.versions().values()) == {1}


@pytest.mark.virtual_time
async def test_boards_that_are_away_take_it_when_they_are_back(tmp_path):
    site = Site(tmp_path, 4)
    async with site.awake():
        await asyncio.sleep(1)
        await site.boards["pi-03"].switch_off()
        known = await site.roll_out(site.release())
        assert (known.state.outcome, known.state.behind) == ("finished", ("pi-03",))
        staying = asyncio.create_task(site.engine(open_rollout(site.data_dir), stays=True).run())
        await asyncio.sleep(30)
        await site.boards["pi-03"].switch_on()
        await until(lambda: site.boards["pi-03"].record().committed == 1)
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
        assert boards_using(site.data_dir, "net/1") == sorted(site.boards)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.virtual_time
async def test_a_server_that_is_killed_anywhere_goes_on(tmp_path, seed):
    """Boards lose power as well; in the end each has it, or is known to lack it."""
    draw = random.Random(seed)
    site = Site(tmp_path, 5)
    async with site.awake():
        known = begin_rollout(site.data_dir, site.release(), msgspec.structs.replace(TERMS, soak_s=5.0))
        for _ in range(40):
            driving = asyncio.create_task(site.engine(known).run())
            await asyncio.wait({driving}, timeout=draw.uniform(0.0, 8.0))
            if driving.done():
                break
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
            unlucky = site.boards[draw.choice(sorted(site.boards))]
            if draw.random() < 0.3:
                await unlucky.switch_off()
                await unlucky.switch_on()
            known = open_rollout(site.data_dir)
        async with asyncio.timeout(3600):
            await site.engine(open_rollout(site.data_dir)).run()
        assert open_rollout(site.data_dir).state.outcome == "finished"
        on_their_way = {name for name, one in site.boards.items() if one.record().committed != 1}
        assert on_their_way <= set(open_rollout(site.data_dir).state.behind)


@pytest.mark.virtual_time
async def test_pause_abort_and_back_reach_the_process_that_drives_it(tmp_path):
    site = Site(tmp_path, 4)
    async with site.awake():
        await site.roll_out(site.release())
        known = begin_rollout(site.data_dir, site.release(layer0=b"\2" * 20_000), TERMS)
        driving = asyncio.create_task(site.engine(known).run())
        await until(lambda: site.boards["pi-00"].record().phase == "trial")
        give_order(open_rollout(site.data_dir), "pause")
        await asyncio.sleep(120)
        assert site.boards["pi-00"].record().committed == 2
        assert list(known.state.offered_boards) == ["pi-00"]
        give_order(open_rollout(site.data_dir), "resume")
        await until(lambda: len(known.state.offered_boards) > 1)
        give_order(open_rollout(site.data_dir), "back")
        await driving
        assert known.state.outcome == "taken-back"
        assert set(site.versions().values()) == {1}


@pytest.mark.virtual_time
async def test_an_aborted_rollout_leaves_what_is_committed_and_stops_what_is_fetched(tmp_path):
    site = Site(tmp_path, 3)
    async with site.awake():
        known = begin_rollout(site.data_dir, site.release(), TERMS)
        driving = asyncio.create_task(site.engine(known).run())
        await until(lambda: site.boards["pi-00"].record().committed == 1)
        give_order(open_rollout(site.data_dir), "abort")
        await driving
        await asyncio.sleep(120)
        assert known.state.outcome == "aborted"
        assert site.versions()["pi-00"] == 1
        assert site.versions()["pi-02"] == 0
        for order in ("resume", "abort", "pause"):
            with pytest.raises(ConfigError):
                give_order(open_rollout(site.data_dir), order)


@pytest.mark.virtual_time
async def test_who_was_away_when_a_rollout_was_aborted_is_named_and_fetches_no_more_once_it_is_back(tmp_path):
    """Else it would wait for parts for ever. A board that was offered nothing lacks nothing."""
    site = Site(tmp_path, 4)
    lost = site.boards["pi-01"]
    lost.says_each_s = 30.0
    async with site.awake(without=["pi-03"]):
        known = begin_rollout(site.data_dir, site.release(), msgspec.structs.replace(TERMS, waves=(0.9,), canary=0))
        driving = asyncio.create_task(site.engine(known).run())
        await until(lambda: lost.record().phase == "offered")
        await lost.switch_off()
        give_order(open_rollout(site.data_dir), "abort")
        await driving
        assert (known.state.outcome, known.state.behind) == ("aborted", ("pi-01",))
        assert names_all(shown(known), "pi-01", "edge-server rollout abort --stay")

        known = open_rollout(site.data_dir)
        give_order(known, "abort")
        staying = asyncio.create_task(site.engine(known, stays=True).run())
        await asyncio.sleep(30)
        await lost.switch_on()
        await until(lambda: lost.record().phase == "superseded")
        await until(lambda: not known.state.behind)
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
        assert lost.record().committed == 0
        assert not names_all(shown(open_rollout(site.data_dir)), "edge-server rollout abort --stay")


@pytest.mark.virtual_time
async def test_a_rollout_whose_process_was_killed_between_the_order_to_abort_and_its_end_can_be_ended(tmp_path):
    site = Site(tmp_path, 2)
    async with site.awake():
        give_order(begin_rollout(site.data_dir, site.release(), TERMS), "abort")
        with pytest.raises(ConfigError, match=naming("edge-server rollout resume")):
            begin_rollout(site.data_dir, site.release(), TERMS)
        known = open_rollout(site.data_dir)
        give_order(known, "abort")
        await site.engine(known).run()
        assert known.state.outcome == "aborted"
        begin_rollout(site.data_dir, site.release(), TERMS)


@pytest.mark.parametrize(
    ("order", "advice"), [("back", "rollout back --stay"), ("stop", ""), ("resume", "rollout resume --stay")]
)
def test_what_is_advised_for_boards_that_are_away_does_what_was_ordered(tmp_path, order, advice):
    known = begin_rollout(tmp_path, make_release(tmp_path, LAYERS), TERMS)
    known.state.apply(RolloutOrdered(at="", order="pause"))
    known.state.apply(RolloutOrdered(at="", order=order))
    known.state.behind = ("pi-01",)
    assert re.findall("rollout .*--stay", shown(known)) == ([advice] if advice else [])


@pytest.mark.parametrize(
    ("count", "away", "pattern", "names"),
    [
        (0, (), "*", "[serve]"),
        (2, (), "jetson-*", "pi-00, pi-01"),
        (2, ("pi-00", "pi-01"), "*", "pi-00, pi-01"),
    ],
)
@pytest.mark.virtual_time
async def test_nobody_to_begin_with_is_named_and_waited_for_no_longer_than_that(tmp_path, count, away, pattern, names):
    site, waited = Site(tmp_path, count), list[str]()
    async with site.awake():
        await asyncio.sleep(1)
        for name in away:
            await site.boards[name].switch_off()
        known = begin_rollout(site.data_dir, site.release(), msgspec.structs.replace(TERMS, devices=pattern))
        engine = site.engine(known, wait_s=90.0, on_wait=waited.append)
        began = asyncio.get_running_loop().time()
        await engine.run()
        assert 90 <= asyncio.get_running_loop().time() - began < 100
        assert (known.state.outcome, known.state.offered_boards) == ("stopped", {})
        assert names in known.state.cause
        assert [names in one for one in waited] == [True]
        give_order(open_rollout(site.data_dir), "resume")


@pytest.mark.virtual_time
async def test_who_waits_goes_on_when_a_board_comes_in_time(tmp_path):
    site = Site(tmp_path, 2)
    async with site.awake(without=("pi-00", "pi-01")):
        known = begin_rollout(site.data_dir, site.release(), TERMS)
        driving = asyncio.create_task(site.engine(known, wait_s=90.0).run())
        await asyncio.sleep(80)
        await site.boards["pi-01"].switch_on()
        await driving
        assert (known.state.outcome, site.versions()) == ("finished", {"pi-00": 0, "pi-01": 1})


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("seconds", [1e9, 100.0], ids=["stalls", "trickles"])
async def test_a_board_that_never_ends_its_download_has_failed_and_holds_nobody(tmp_path, seconds, ahead):
    """It is told to stop, and the others go on where so many failures are allowed; else the rollout stops."""
    site = Site(tmp_path, 4)
    site.boards["pi-01"].says_each_s = seconds
    async with site.awake():
        known = await site.roll_out(site.release(), max_failures=2, waves=(0.5, 1.0), ahead=ahead)
        assert known.state.outcome == "finished"
        assert site.versions() == {"pi-00": 1, "pi-01": 0, "pi-02": 1, "pi-03": 1}
        assert list(known.state.failures) == ["pi-01"]
        assert names_all(known.state.failures["pi-01"], "0.1 MB", "126 s", "16 kB/s")
        assert open_rollout(site.data_dir).state.failures == known.state.failures
        await until(lambda: site.boards["pi-01"].store.ahead() is None)
        await until(lambda: site.boards["pi-01"].record().phase == ("none" if ahead else "superseded"))
        stopped = await site.roll_out(site.release(layer0=b"\5" * 20_000), waves=(0.5, 1.0), on_failure="back")
        assert stopped.state.outcome == "taken-back"
        assert set(site.versions().values()) == {0, 1}
        last = await site.roll_out(site.release(layer0=b"\4" * 20_000), waves=(0.5, 1.0), ahead=ahead)
        assert (last.state.outcome, list(last.state.failures)) == ("stopped", ["pi-01"])
        await until(lambda: site.boards["pi-01"].store.ahead() is None)
        await until(lambda: site.boards["pi-01"].record().phase == ("none" if ahead else "superseded"))


@pytest.mark.virtual_time
async def test_a_first_release_is_taken_back_where_a_folder_has_another_and_stays_where_nothing_else_would_answer(
    tmp_path,
):
    site = Site(tmp_path, 2)
    site.boards["pi-01"].folders = {"net": 7}
    async with site.awake():
        known = await site.roll_out(site.release())
        give_order(known, "back")
        await site.engine(known).run()
        assert (known.state.outcome, site.versions()) == ("taken-back", {"pi-00": 1, "pi-01": 0})


def test_two_rollouts_at_once_are_refused(tmp_path):
    site = Site(tmp_path, 0)
    stored = site.release()
    first = begin_rollout(site.data_dir, stored, TERMS)
    with pytest.raises(ConfigError, match=naming(first.state.plan.deployment, "going", "edge-server rollout resume")):
        begin_rollout(site.data_dir, stored, TERMS)
    give_order(first, "pause")
    with pytest.raises(ConfigError, match=naming(first.state.plan.deployment, "paused")):
        begin_rollout(site.data_dir, stored, TERMS)


async def test_a_board_whose_runtime_cannot_read_it_says_so_before_anything_is_fetched(tmp_path):
    site = Site(tmp_path, 1)
    board = site.boards["pi-00"]
    board.runtime = "1.17.1"
    stored = site.release()
    newer = msgspec.structs.replace(stored.manifest, opset=22)
    parts = {part.sha256: stored.path(part.sha256).read_bytes() for part in newer.parts.values()}
    async with site.awake():
        known = await site.roll_out(publish(site.data_dir, newer, parts))
        assert known.state.outcome == "stopped"
        assert names_all(known.state.failures["pi-00"], 22)
        assert board.bytes_fetched == 0


async def test_a_part_that_rots_on_the_board_is_fetched_whole(tmp_path):
    site = Site(tmp_path, 1)
    async with site.awake():
        await site.roll_out(site.release())
        store = site.boards["pi-00"].store
        path = store.parts.path(store.manifest("net", 1).parameters.sha256)
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.chmod(0o600)
        path.write_bytes(bytes(data))
        known = await site.roll_out(site.release(layer0=b"\3" * 20_000))
        assert known.state.outcome == "finished"
        assert [one.size > 100_000 for one in sent(known, site.data_dir)] == [False, True]
