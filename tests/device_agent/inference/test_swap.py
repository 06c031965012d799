"""Swaps in virtual time: gates, trials, the way back, newer offers, restarts, disks that refuse; no second passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from device_agent.inference.candidate import MOST_STARTS, GateVerdict, SwapContext
from device_agent.inference.messages import Figures
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.errors import CorruptFile, ServingRefused, Unwritable
from shared.protocol.inference.release import write_manifest
from shared.protocol.update import UpdateRecord
from shared.runtime.executor import background, inline
from tests.device_agent.inference.releases import MemoryServing, light_release, offer_of
from tests.full_disk import refuse_writes

pytestmark = pytest.mark.virtual_time

NAME, SOAK_S = "digits", 600.0
COMMITTED = ["offered", "fetched", "verified", "staged", "trial", "committed"]


@dataclass
class Board:
    """A board whose agent may be started again and again.

    Attributes:
        folder: Where its releases lie.
        serving: Its inference process, which the agent outlives or not.
        verdicts: Of versions, by the gates; those that are not named pass.
        gate_s: What the gates take.
        has_folder: Whether its operator put another version there.
        said: All that was announced, in order.
    """

    folder: Path
    serving: MemoryServing = field(default_factory=MemoryServing)
    verdicts: dict[int, GateVerdict] = field(default_factory=dict)
    gate_s: float = 1.0
    has_folder: bool = False
    said: list[UpdateRecord] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    swap: Swaps = field(init=False)

    @property
    def store(self) -> BoardStore:
        return BoardStore(self.folder, reserve_bytes=0)

    @property
    def record(self) -> UpdateRecord:
        return self.store.record(NAME)

    @property
    def phases(self) -> list[str]:
        return [one.phase for one in self.said]

    async def _gates(self, record: UpdateRecord) -> GateVerdict:
        self.tried.append(record.candidate)
        await asyncio.sleep(self.gate_s)
        return self.verdicts.get(record.candidate, GateVerdict())

    def _announce(self, record: UpdateRecord) -> None:
        assert self.store.record(record.name) == record, "announced before it was durable"
        self.said.append(record)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run its agent while the block lasts."""
        us = self.store, self.serving, self._gates, self._announce
        around = SwapContext(*us, worker=inline, has_folder=lambda *_: self.has_folder)
        self.swap = Swaps(around)
        async with background(self.swap.run()):
            yield

    async def offer(self, version: int, *, attempt: int = 1, size: int = 100, **terms: float) -> UpdateRecord:
        """Offer a version, and have its parts be there where they are asked for."""
        manifest, parts = light_release(NAME, version, size)
        offer = offer_of(manifest, attempt=attempt, **{"soak_s": SOAK_S, **terms})
        record = await self.swap.accept_offer(write_manifest(manifest), offer)
        if record.phase != "offered" or record.candidate != version:
            return record
        for digest, data in parts.items():
            self.store.parts.add(digest, data)
        return await self.swap.mark_fetched(NAME, offer.deployment)

    async def commit(self, version: int) -> None:
        await self.offer(version)
        await self.reach("committed")
        assert self.record.committed == version

    async def reach(self, phase: str) -> None:
        async with asyncio.timeout(10 * SOAK_S):
            while self.record.phase != phase:  # noqa: ASYNC110 - what lies on the disk says nothing
                await asyncio.sleep(1.0)
        await asyncio.sleep(1.0)  # what follows the record, such as files that go


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


async def test_a_version_is_committed_and_the_next_one_takes_its_place(board):
    async with board.running():
        await board.commit(1)
        assert board.phases == COMMITTED
        assert board.serving.current == {NAME: 1}
        await board.commit(2)
        assert board.serving.current == {NAME: 2}
        assert board.serving.loaded == {NAME: {2}}
        assert (board.record.previous, board.store.versions(NAME)) == (1, [1, 2])
        assert board.phases == COMMITTED * 2


async def test_a_trial_lasts_as_long_as_it_is_to(board):
    async with board.running():
        await board.offer(1, soak_s=3600.0)
        await board.reach("trial")
        began = asyncio.get_running_loop().time()
        await board.reach("committed")
        assert 3590.0 < asyncio.get_running_loop().time() - began < 3610.0


async def test_a_gate_that_fails_keeps_it_from_answering_and_it_is_not_tried_again(board):
    board.verdicts[2] = GateVerdict(reason="finite: parameter 'w' holds NaN")
    async with board.running():
        await board.commit(1)
        asked = len(board.serving.asked)
        await board.offer(2)
        await board.reach("refused")
        assert board.record.reason == "finite: parameter 'w' holds NaN"
        assert len(board.serving.asked) == asked  # the process never heard of it
        assert board.store.versions(NAME) == [1]
        assert (await board.offer(2)).phase == "refused"  # the broker said it once more
        assert board.tried == [1, 2]
        await board.commit(3)
        manifest, _ = light_release(NAME, 2)
        told = await board.swap.accept_offer(write_manifest(manifest), offer_of(manifest, "another"))
        assert (told.phase, told.reason) == ("refused", "finite: parameter 'w' holds NaN")
        assert board.tried == [1, 2, 3]
        board.verdicts.clear()
        await board.offer(2, attempt=2)  # somebody asks anew
        await board.reach("committed")
        assert board.record.committed == 2


async def test_a_refusal_of_the_moment_is_none_of_the_release_s(board):
    board.verdicts[1] = GateVerdict(reason="runtime: no onnxruntime", lasting=False)
    async with board.running():
        await board.offer(1)
        await board.reach("refused")
        assert board.record.failed == ()


@pytest.mark.parametrize(
    ("figures", "cause"),
    [(Figures(NAME, 2, 50, 40), "errors"), (Figures(NAME, 2, 50, 1, 1), "finite"), (None, "crashes")],
)
async def test_what_does_worse_goes_back_by_itself(board, figures, cause):
    """Figures turn bad an hour into a long trial; None stands for a process that died and is there again."""
    async with board.running():
        await board.commit(1)
        await board.offer(2, soak_s=7200.0)
        await board.reach("trial")
        assert board.serving.current == {NAME: 2}
        await asyncio.sleep(3600.0)
        assert board.record.phase == "trial"
        if figures:
            board.serving.figures_of[2] = figures
        else:
            board.serving.starts += 1
        await asyncio.sleep(10.0)
        assert (board.record.phase, board.record.committed, board.record.candidate) == ("rolled-back", 1, 2)
        assert board.record.reason.startswith(f"{cause}: ")
        assert board.serving.current == {NAME: 1}
        assert board.serving.loaded == {NAME: {1}}
        assert (await board.offer(2)).phase == "rolled-back"  # not again
        await board.commit(3)


async def test_a_first_version_that_does_worse_leaves_nothing(board):
    async with board.running():
        await board.offer(1)
        await board.reach("trial")
        board.serving.figures_of[1] = Figures(NAME, 1, 50, 40)
        await board.reach("rolled-back")
        assert board.serving.current == {}
        assert board.record.committed == 0


async def test_a_version_that_the_process_does_not_load_is_refused(board):
    board.serving.refused = {2}
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await board.reach("refused")
        assert board.record.reason == "load: it has no room for it"
        assert board.serving.current == {NAME: 1}


async def test_a_process_that_dies_once_is_asked_again_and_one_that_keeps_dying_is_the_model_s_fault(board):
    async with board.running():
        await board.commit(1)
        board.serving.dying = 1
        await board.commit(2)
        board.serving.dying = 3
        await board.offer(3)
        await board.reach("refused")
        assert board.record.reason == "load: the inference process ended"
        assert board.serving.current == {NAME: 2}


async def test_a_process_that_dies_at_the_way_back_serves_the_old_one_all_the_same(board):
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await board.reach("trial")
        board.serving.figures_of[2] = Figures(NAME, 2, 50, 40)
        board.serving.dying = 2
        await board.reach("rolled-back")
        assert board.serving.current == {NAME: 1}


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
async def test_a_newer_offer_supersedes_what_is_under_way(board, wait_s):
    """Heard before its parts are here, and in the middle of the gates."""
    board.gate_s = 100.0
    async with board.running():
        first, _ = light_release(NAME, 1)
        await board.swap.accept_offer(write_manifest(first), offer_of(first))
        await asyncio.sleep(wait_s)
        if wait_s:
            await board.offer(2)
            await asyncio.sleep(50.0)
            assert board.tried == [2]
        board.gate_s = 1.0
        await board.commit(3)
        superseded = ["offered", "superseded"] if not wait_s else ["offered", "superseded", "offered", "fetched"]
        assert board.phases == [*superseded, *(["superseded"] if wait_s else []), *COMMITTED]
        assert board.store.versions(NAME) == [3]
        assert (await board.swap.mark_fetched(NAME, "to-1")).committed == 3  # of an offer that is gone


async def test_an_offer_waits_for_the_end_of_a_trial_and_the_last_one_counts(board):
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await board.reach("trial")
        third, fourth = asyncio.create_task(board.offer(3)), asyncio.create_task(board.offer(4))
        await asyncio.sleep(SOAK_S / 2)
        assert (board.record.phase, board.record.candidate) == ("trial", 2)
        await asyncio.sleep(SOAK_S / 2 + 20.0)
        await asyncio.gather(third, fourth)
        assert (board.record.committed, board.record.candidate) == (2, 4)
        await board.reach("committed")
        assert board.record.committed == 4
        assert "superseded" not in board.phases


async def test_what_is_offered_and_answers_already_is_committed_at_once(board):
    async with board.running():
        await board.commit(1)
        manifest, _ = light_release(NAME, 1)
        told = await board.swap.accept_offer(write_manifest(manifest), offer_of(manifest, "again"))
        assert (told.phase, told.deployment, board.tried) == ("committed", "again", [1])


async def test_a_version_with_another_content_is_refused_and_what_answers_is_untouched(board):
    async with board.running():
        await board.commit(1)
        other, _ = light_release(NAME, 1, 333)
        told = await board.swap.accept_offer(write_manifest(other), offer_of(other, "other"))
        assert (told.phase, bool(told.reason)) == ("refused", True)
        assert board.store.manifest(NAME, 1) == light_release(NAME, 1)[0]
        with pytest.raises(CorruptFile, match=f"{NAME}/1"):
            await board.swap.accept_offer(write_manifest(other), offer_of(light_release(NAME, 1)[0]))


async def test_going_back_by_hand(board):
    async with board.running():
        await board.commit(1)
        await board.commit(2)
        assert (await board.swap.take_back(NAME, 1)).committed == 2  # it is not in use
        await board.offer(3)
        await board.reach("trial")
        with pytest.raises(ServingRefused, match="3"):
            await board.swap.take_back(NAME, 2)
        told = await board.swap.take_back(NAME, 3)
        assert (told.phase, bool(told.reason), told.committed) == ("rolled-back", True, 2)
        assert board.serving.current == {NAME: 2}
        told = await board.swap.take_back(NAME, 2)
        assert (told.phase, told.committed, told.previous) == ("rolled-back", 1, 0)
        assert board.serving.current == {NAME: 1}
        assert board.serving.loaded == {NAME: {1}}
        assert (await board.swap.take_back(NAME, 1)).committed == 1  # there was none before it
        board.gate_s = 100.0
        await board.offer(4)
        assert (await board.swap.take_back(NAME, 4)).phase == "superseded"
        await asyncio.sleep(200.0)
        assert board.serving.current == {NAME: 1}


async def test_the_first_version_that_came_goes_where_a_folder_has_another(board):
    """What serves has that one answer again, once it is to part with this; a later offer begins anew."""
    board.has_folder = True
    async with board.running():
        await board.commit(1)
        told = await board.swap.take_back(NAME, 1)
        assert (told.phase, told.committed, told.candidate) == ("rolled-back", 0, 1)
        assert board.serving.asked[-1] == ("unload", 1)
        assert ("load", 0) not in board.serving.asked
        await board.commit(2)
        assert board.serving.current == {NAME: 2}


async def test_a_version_before_that_cannot_be_loaded_leaves_the_one_that_answers(board):
    async with board.running():
        await board.commit(1)
        await board.commit(2)
        board.serving.refused = {1}
        with pytest.raises(ServingRefused):
            await board.swap.take_back(NAME, 2)
        assert (board.record.committed, board.serving.current) == (2, {NAME: 2})


@pytest.mark.parametrize("after_s", [0.2, 1.2, 30.0, 590.0])
async def test_an_agent_that_is_ended_and_started_goes_on(board, after_s):
    """In the gates and in the trial; its inference process ended with it, and starts with what the record says."""
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await asyncio.sleep(after_s)
    record = board.record
    assert record.phase in ("fetched", "trial")
    board.serving = MemoryServing(loaded={NAME: {1, record.serving}}, current={NAME: record.serving})
    async with board.running():
        await board.reach("committed")
    assert (board.record.committed, board.serving.current, board.record.starts) == (
        2,
        {NAME: 2},
        int(record.phase == "trial"),
    )


@pytest.mark.parametrize(("after_s", "phase"), [(0.2, "refused"), (30.0, "rolled-back")])
async def test_a_candidate_under_which_agents_end_again_and_again_is_given_up(board, after_s, phase):
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await asyncio.sleep(after_s)
    for _ in range(MOST_STARTS + 1):
        assert board.record.phase != phase
        record = board.record
        board.serving = MemoryServing(loaded={NAME: {1, record.serving}}, current={NAME: record.serving})
        async with board.running():
            await asyncio.sleep(0.2)
    assert (board.record.phase, board.record.committed, board.serving.current) == (phase, 1, {NAME: 1})
    assert board.record.reason.startswith("crashes: ")


async def test_the_first_start_of_a_process_is_no_crash(board):
    """An agent that is started in the trial of a first version asks before there is any process."""
    async with board.running():
        await board.offer(1)
        await board.reach("trial")
    board.serving = LateServing(starts=0, loaded={NAME: {1}}, current={NAME: 1})
    async with board.running():
        await board.reach("committed")
    assert board.serving.starts == 1


class LateServing(MemoryServing):
    """Starts when it is asked for something."""

    async def switch(self, name: str, version: int) -> None:
        self.starts = 1
        await super().switch(name, version)


async def test_a_start_that_finds_an_ended_phase_says_it_again(board):
    async with board.running():
        await board.commit(1)
    board.said.clear()
    async with board.running():
        await asyncio.sleep(1.0)
    assert board.phases == ["committed"]


async def test_two_names_do_not_wait_for_each_other(board):
    async with board.running():
        await board.offer(1)
        await board.reach("trial")
        other, parts = light_release("other", 1)
        await board.swap.accept_offer(write_manifest(other), offer_of(other, soak_s=10.0))
        for digest, data in parts.items():
            board.store.parts.add(digest, data)
        await board.swap.mark_fetched("other", "to-1")
        await asyncio.sleep(30.0)
        assert (board.store.record("other").phase, board.record.phase) == ("committed", "trial")


async def test_a_release_without_room_is_refused_before_anything_is_fetched(board, monkeypatch):
    async with board.running():
        await board.commit(1)
        with monkeypatch.context() as patch:
            free = board.store.require_room.__globals__["shutil"].disk_usage(board.folder)._replace(free=50)
            patch.setattr("shutil.disk_usage", lambda _: free)
            told = await board.offer(2)
        assert (told.phase, told.failed) == ("refused", ())
        assert told.reason.startswith("disk: ")
        await board.offer(2, attempt=2)
        await board.reach("committed")


async def test_a_disk_that_takes_nothing_does_not_keep_a_bad_version(board, monkeypatch):
    """It goes back at once; the record follows when there is room. What is offered meanwhile is told that."""
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await board.reach("trial")
        with monkeypatch.context() as patch:
            refuse_writes(patch)
            board.serving.figures_of[2] = Figures(NAME, 2, 50, 40)
            await asyncio.sleep(10.0)
            assert board.serving.current == {NAME: 1}
            assert (board.record.phase, board.phases[-1]) == ("trial", "trial")
        await asyncio.sleep(60.0)
        assert (board.record.phase, board.phases[-1]) == ("rolled-back", "rolled-back")
        assert board.serving.current == {NAME: 1}
        with monkeypatch.context() as patch:
            refuse_writes(patch)
            with pytest.raises(Unwritable):
                await board.offer(3)
        await board.commit(3)


async def test_a_disk_that_takes_nothing_at_the_end_of_a_trial_is_waited_for(board, monkeypatch):
    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await board.reach("trial")
        with monkeypatch.context() as patch:
            refuse_writes(patch)
            await asyncio.sleep(SOAK_S + 20.0)
            assert board.record.phase == "trial"
        await board.reach("committed")
        assert board.record.committed == 2


async def test_a_record_that_nothing_can_read_begins_anew(board):
    async with board.running():
        await board.commit(1)
    for name in ("state", "state.before"):
        (board.store.folder / NAME / name).write_bytes(b"rot")
    async with board.running():
        await board.commit(2)
    assert msgspec.structs.replace(board.record, since=0.0).previous == 0


async def test_a_trial_has_a_deadline(board):
    """Where the process says nothing for ever: the old version answers again."""

    async def silent(name: str, version: int) -> Figures:
        await asyncio.Event().wait()
        raise AssertionError

    async with board.running():
        await board.commit(1)
        await board.offer(2)
        await board.reach("trial")
        board.serving.figures = silent
        await asyncio.sleep(3 * SOAK_S + 100.0)
        assert board.record.phase == "rolled-back"
        assert board.record.reason.startswith("deadline: ")
        assert board.serving.current == {NAME: 1}
