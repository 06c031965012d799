"""What is kept of a round's gradients: all there is room for, and of each device the last."""

from __future__ import annotations

import pytest

from edge_server.rounds.split import gradient_store
from edge_server.rounds.split.gradient_store import FilePart, GradientStore, SentGradients
from shared.transfer.sender import Sender

SIZE = 1000


def gradient(step: int) -> Sender:
    """Return a step's."""
    return Sender.of_parts([memoryview(bytes([step]) * SIZE)], 1024)


def kept(shelf: GradientStore, *steps: int) -> SentGradients:
    """Return what is kept of a device after some steps."""
    answers = SentGradients()
    for step in steps:
        answers.serve(step, b"features of %d" % step)
        assert answers.answers(step, b"features of %d" % step)
        assert answers.of_step(step) is None, "it is being computed"
        answers.put(step, gradient(step), shelf)
    return answers


def test_every_step_of_a_round_is_kept_and_found_by_its_number() -> None:
    shelf = GradientStore(1 << 20)
    answers = kept(shelf, 1, 2, 5)
    assert (answers.last, shelf.used, shelf.is_full) == (5, 3 * SIZE, False)
    for step in (1, 2, 5):
        assert answers.of_step(step).transfer.digest == gradient(step).transfer.digest
    assert answers.of_step(3) is None
    assert not answers.answers(2, b"others")


def test_behind_a_step_that_was_missed_the_next_one_is_known() -> None:
    answers = kept(GradientStore(1 << 20), 1, 2, 5)
    assert [answers.next_served(step) for step in range(1, 7)] == [None, None, 5, 5, None, None]
    assert SentGradients().next_served(1) is None
    assert SentGradients().last == 0


def test_beyond_the_bound_only_the_last_of_each_device_is_kept() -> None:
    """A device that has not got it yet asks for it again."""
    shelf = GradientStore(2 * SIZE)
    first = kept(shelf, 1)
    second = kept(shelf, 1, 2, 3)
    assert (shelf.used, shelf.is_full) == (2 * SIZE, True)
    assert [second.of_step(step) is not None for step in (1, 2, 3)] == [True, False, True]
    assert not second.answers(2, b"features of 2")
    assert second.answers(3, b"features of 3")
    assert first.of_step(1) is not None
    none = kept(GradientStore(0), 1, 2)
    assert (none.of_step(1), none.last) == (None, 2)
    assert none.next_served(1) is None, "it was not missed: the device goes on where the server is"


def test_of_a_device_that_failed_meanwhile_nothing_is_kept() -> None:
    shelf, answers = GradientStore(1 << 20), SentGradients()
    answers.put(1, gradient(1), shelf)
    assert (answers.of_step(1), shelf.used) == (None, 0)


def whole(sender: Sender, *, at: int = 0, length: int = SIZE) -> bytes:
    return b"".join(sender.source.read(at, length))


def test_what_is_no_devices_last_lies_in_a_file_once_there_is_much(tmp_path, monkeypatch) -> None:
    """To the byte, also in parts; and the file has no name, so that nothing of it is left when it is over."""
    monkeypatch.setattr(gradient_store, "IN_MEMORY", 2 * SIZE)
    shelf = GradientStore(1 << 20, tmp_path / "updates")
    first, second = kept(shelf, 1, 2, 3, 4), kept(shelf, 1, 2)
    places = [isinstance(first.of_step(step).source, FilePart) for step in (1, 2, 3, 4)]
    assert places == [False, False, True, False], "the last one is on its way"
    assert [isinstance(second.of_step(step).source, FilePart) for step in (1, 2)] == [True, False]
    for answers, steps in ((first, (1, 2, 3, 4)), (second, (1, 2))):
        for step in steps:
            assert answers.of_step(step).transfer == gradient(step).transfer
            assert whole(answers.of_step(step)) == bytes([step]) * SIZE
    assert whole(first.of_step(3), at=990, length=64) == bytes([3]) * 10
    assert whole(first.of_step(3), at=SIZE) == b""
    assert [*(tmp_path / "updates").iterdir()] == []


def test_a_disk_that_takes_nothing_leaves_them_in_memory(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(gradient_store, "IN_MEMORY", 0)
    (tmp_path / "updates").write_text("no folder")
    answers = kept(GradientStore(1 << 20, tmp_path / "updates"), 1, 2, 3)
    assert [whole(answers.of_step(step)) for step in (1, 2, 3)] == [bytes([step]) * SIZE for step in (1, 2, 3)]
    assert [(one.levelname, one.name) for one in caplog.records] == [("WARNING", gradient_store.__name__)]


@pytest.mark.parametrize("limit", [0, SIZE])
def test_what_has_no_room_is_not_written(tmp_path, monkeypatch, limit) -> None:
    monkeypatch.setattr(gradient_store, "IN_MEMORY", 0)
    answers = kept(GradientStore(limit, tmp_path), 1, 2, 3)
    assert [answers.of_step(step) is not None for step in (1, 2, 3)] == [limit > 0, False, True]
