"""The outbox: what is in it survives any kill, what is half-written does not, and states follow their updates."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from shared.protocol.messages import Transfer, Update

Fill = Callable[..., Path]
BYTES = b"moved" * 300


def update(number: int = 1, run: str = "trial", **fields: object) -> Update:
    return Update(run=run, round=number, device="board", params=None, **fields)


@pytest.fixture
def reopen(tmp_path: Path) -> Callable[[], Outbox]:
    """Open the outbox as a new agent does."""
    return lambda: Outbox(tmp_path / "outbox", tmp_path / "state")


@pytest.fixture
def fill() -> Fill:
    """Write what a trainer leaves in a draft."""

    def write(draft: Path, number: int = 1, run: str = "trial", state: bytes = b"") -> Path:
        (draft / outbox.PAYLOAD).write_bytes(BYTES)
        if state:
            (draft / outbox.STATE).write_bytes(state)
        transfer = Transfer(digest=bytes(16), size=len(BYTES), frame_bytes=1024)
        outbox.write(draft, Update(run=run, round=number, device="board", params=transfer, weight=3.0))
        return draft

    return write


def test_a_draft_counts_once_it_is_committed(reopen: Callable[[], Outbox], fill: Fill) -> None:
    """Neither `has` nor `entries` sees a draft; a committed one is there whole."""
    box = reopen()
    draft = fill(box.draft("trial", 1))
    assert not box.has("trial", 1, b"")
    assert box.entries() == []
    box.commit(draft)
    assert box.has("trial", 1, b"")
    (entry,) = box.entries()
    assert (entry.update.run, entry.update.round, entry.update.weight) == ("trial", 1, 3.0)
    assert entry.payload.read_bytes() == BYTES
    assert not draft.exists()


def test_a_trainer_may_have_committed_already(reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path) -> None:
    """The child commits; the agent's own commit after it only takes over the state."""
    box = reopen()
    draft = fill(box.draft("trial", 1), state=b"momentum")
    outbox.commit(draft)
    box.commit(draft)
    assert len(box.entries()) == 1
    assert (tmp_path / "state" / "trial").read_bytes() == b"momentum"


def test_a_removed_entry_leaves_one_spare(reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path) -> None:
    """Removing also works twice, and while other entries wait; of all entries one is kept to be overwritten."""
    box = reopen()
    box.commit(fill(box.draft("trial", 1)))
    box.commit(fill(box.draft("trial", 2), 2))
    first, second = box.entries()
    box.remove(first)
    box.remove(first)
    assert not box.has("trial", 1, b"")
    assert [entry.update.round for entry in box.entries()] == [2]
    box.remove(second)
    assert [path.name for path in (tmp_path / "outbox").iterdir()] == [outbox.SPARE]


def test_an_entry_that_overwrites_a_longer_one_is_cut(reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path) -> None:
    """The spare entry's old bytes never reach the server; a spare payload of earlier versions is removed."""
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox" / outbox.OLD_SPARE).write_bytes(b"x" * 1000)
    box = reopen()
    draft = box.draft("trial", 1)
    for file, text in ((outbox.PAYLOAD, b"payload"), (outbox.UPDATE, b"update")):
        (draft / file).write_bytes(1000 * text)
    draft.rename(tmp_path / "outbox" / outbox.SPARE)
    draft = box.draft("trial", 2)
    assert outbox.write_payload(draft, [memoryview(b"new")]) == len(b"new")
    update = Update(run="trial", round=2, device="board", params=None)
    outbox.write(draft, update)
    assert (draft / outbox.PAYLOAD).read_bytes() == b"new"
    assert outbox.read(draft) == update
    assert [path.name for path in (tmp_path / "outbox").iterdir()] == [draft.name]


def test_entries_come_oldest_round_first(reopen: Callable[[], Outbox]) -> None:
    """Also beyond nine, where names sorted as words would not."""
    box = reopen()
    for number in (10, 2, 111, 1):
        box.add(update(number))
    assert [entry.update.round for entry in box.entries()] == [1, 2, 10, 111]


def test_a_failure_is_an_entry_without_payload(reopen: Callable[[], Outbox]) -> None:
    box = reopen()
    box.add(update(failure="the trainer died"))
    (entry,) = reopen().entries()
    assert entry.update.failure == "the trainer died"
    assert not entry.payload.exists()


def test_what_is_committed_is_there_after_a_restart(reopen: Callable[[], Outbox], fill: Fill) -> None:
    box = reopen()
    box.commit(fill(box.draft("trial", 4), 4))
    assert [entry.update.round for entry in reopen().entries()] == [4]


def test_an_entry_whose_rename_a_power_cut_has_undone_is_still_that_of_its_round(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path
) -> None:
    """A reused entry has its new content on the disk before its new name: else its task is trained once more."""
    reopen().commit(fill(reopen().draft("trial", 2), 2, state=b"momentum"))
    (tmp_path / "outbox" / "trial@000002").rename(tmp_path / "outbox" / "trial@000001")
    box = reopen()
    assert box.has("trial", 2, b"")
    assert [entry.path.name for entry in box.entries()] == ["trial@000002"]


def test_leftovers_of_a_killed_process_are_dropped_before_the_next_draft(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path
) -> None:
    """A draft cut short, and an entry half removed, go when the next task begins; nothing of them is ever offered."""
    box = reopen()
    (box.draft("trial", 1) / outbox.PAYLOAD).write_bytes(b"half")
    half_removed = tmp_path / "outbox" / ".trial@000007"
    half_removed.mkdir()
    (half_removed / outbox.UPDATE).write_bytes(b"x")
    box = reopen()
    assert box.entries() == []
    draft = box.draft("trial", 2)
    assert list((tmp_path / "outbox").iterdir()) == [draft]
    assert list(draft.iterdir()) == []


def test_a_restarted_agent_leaves_the_draft_of_a_trainer_that_outlived_it(
    reopen: Callable[[], Outbox], fill: Fill
) -> None:
    """The trainer of a killed agent finishes its task: opening the outbox must not pull the draft from under it."""
    draft = reopen().draft("trial", 3)
    box = reopen()
    outbox.commit(fill(draft, 3))
    assert box.has("trial", 3, b"")


def test_the_state_of_a_committed_entry_is_promoted_at_start(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path
) -> None:
    """Killed between commit and promotion: the update is in the outbox, so its state must be the device's."""
    outbox.commit(fill(reopen().draft("trial", 1), state=b"after round 1"))
    assert not (tmp_path / "state" / "trial").exists()
    box = reopen()
    assert (tmp_path / "state" / "trial").read_bytes() == b"after round 1"
    assert box.has("trial", 1, b"")


def test_a_state_committed_late_is_promoted_before_the_next_task(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path
) -> None:
    """A trainer that outlived its agent commits after the new one has opened the outbox: no round is forgotten."""
    box = reopen()
    outbox.commit(fill(box.draft("trial", 9), 9, state=b"after round 9"))
    box.draft("trial", 10)
    assert (tmp_path / "state" / "trial").read_bytes() == b"after round 9"


def test_a_state_that_waits_is_the_device_s_once_its_update_is_settled(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path
) -> None:
    """Of a trainer that outlived its agent, and settled before the next task: it must not go with its entry."""
    box = reopen()
    outbox.commit(fill(box.draft("trial", 9), 9, state=b"after round 9"))
    box.remove(*box.entries())
    assert box.entries() == []
    assert (tmp_path / "state" / "trial").read_bytes() == b"after round 9"


def test_of_several_states_the_newest_round_s_is_the_one_that_stays(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path
) -> None:
    reopen()
    for number in (100, 9, 10):
        draft = tmp_path / "outbox" / f".trial@{number:06d}"
        draft.mkdir()
        outbox.commit(fill(draft, number, state=f"after round {number}".encode()))
    reopen()
    assert (tmp_path / "state" / "trial").read_bytes() == b"after round 100"


def test_runs_keep_their_states_apart(reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path) -> None:
    """Each with what was before its first round: nothing."""
    box = reopen()
    for run in ("a.1", "a"):
        box.commit(fill(box.draft(run, 1), run=run, state=run.encode()))
    found = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    assert found == {"a": b"a", "a.1": b"a.1", "a@000001": b"", "a.1@000001": b""}


@pytest.mark.parametrize("damage", [b"", b"FM\x01\x80", b"\xff" * 50, None], ids=["empty", "cut", "garbage", "absent"])
def test_a_corrupt_update_is_set_aside_and_the_others_are_delivered(
    reopen: Callable[[], Outbox], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    """It is reported once, kept for inspection, and out of the way of a new attempt at the same round."""
    box = reopen()
    for number in (1, 2, 3):
        box.add(update(number))
    broken = tmp_path / "outbox" / "trial@000002" / outbox.UPDATE
    if damage is None:
        broken.unlink()
    else:
        broken.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert [entry.update.round for entry in box.entries()] == [1, 3]
        assert [entry.update.round for entry in reopen().entries()] == [1, 3]
    assert len(caplog.records) == 1
    assert "trial@000002" in caplog.text
    assert not box.has("trial", 2, b"")
    box.add(update(2))
    assert [entry.update.round for entry in box.entries()] == [1, 2, 3]
    aside = [path for path in (tmp_path / "outbox").iterdir() if "corrupt" in path.name]
    assert len(aside) == 1
    if damage is not None:
        assert (aside[0] / outbox.UPDATE).read_bytes() == damage


def test_the_same_round_may_be_corrupt_twice(reopen: Callable[[], Outbox], tmp_path: Path) -> None:
    """A disk that rots again must not stop the agent: the newer one takes the place of the older one set aside."""
    box = reopen()
    for content in (b"first", b"second"):
        box.add(update(5))
        (tmp_path / "outbox" / "trial@000005" / outbox.UPDATE).write_bytes(content)
        assert box.entries() == []
        [aside] = (tmp_path / "outbox").glob(".*.corrupt")
        assert (aside / outbox.UPDATE).read_bytes() == content
    box.add(update(5))
    assert [entry.update.round for entry in box.entries()] == [5]


def test_a_file_that_is_no_folder_stops_nothing(reopen: Callable[[], Outbox], tmp_path: Path) -> None:
    """What an operator, a file manager or a network file system leaves in the folder is not taken for an entry."""
    reopen()
    (tmp_path / "outbox" / ".nfs0001").write_bytes(b"x")
    (tmp_path / "outbox" / "stray").write_bytes(b"x")
    box = reopen()
    box.add(update(1))
    assert [entry.update.round for entry in box.entries()] == [1]


def test_the_settlement_of_an_earlier_try_spares_the_newer_update(reopen: Callable[[], Outbox], fill: Fill) -> None:
    """The server repeats a round: the new update takes the place of the old one, which is settled only then."""
    box = reopen()
    box.commit(fill(box.draft("trial", 1)))
    (old,) = box.entries()
    draft = fill(box.draft("trial", 1))
    outbox.write(draft, update(start=b"other parameters"))
    box.commit(draft)
    box.remove(old)
    (newer,) = box.entries()
    assert newer.update.start == b"other parameters"
    box.remove(newer)
    assert box.entries() == []


def test_its_folders_are_made_as_far_down_as_they_lack_and_are_private(tmp_path: Path) -> None:
    """Those of versions before were everybody's to look into."""
    folder, states = tmp_path / "deep" / "down" / "outbox", tmp_path / "state"
    states.mkdir(mode=0o755)
    Outbox(folder, states)
    assert [path.stat().st_mode & 0o777 for path in (folder, states)] == [0o700, 0o700]


def test_where_its_folder_was_deleted_nothing_waits_and_another_is_made(
    reopen: Callable[[], Outbox], fill: Fill, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = reopen()
    box.commit(fill(box.draft("trial", 1)))
    shutil.rmtree(tmp_path / "outbox")
    assert box.entries() == []
    assert (tmp_path / "outbox").is_dir()
    assert [record.args[0] for record in caplog.records] == [tmp_path / "outbox"]
