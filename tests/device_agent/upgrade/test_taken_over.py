"""Compromised agent: the upgrade record stays readable, downgrades are refused."""

from __future__ import annotations

import pytest

from device_agent.upgrade import upgrade_state
from device_agent.upgrade.record import FOLDER, MOST_BYTES, RECORD, WANTED, read_upgrade
from device_agent.upgrade.transitions import apply_event, mark_rollback
from device_agent.upgrade.versions import is_older
from shared.errors import CorruptFile, Unwritable
from tests.device_agent.upgrade.test_updater import take
from tests.naming import names_all


def wish(board, text):
    (board.state / FOLDER / WANTED).write_bytes(text)


WISHES = {
    "a name longer than a record": b'{"version":"2","deployment":"%s"}' % (b"x" * (MOST_BYTES - 64)),
    "no end of a string": b'{"version":"2\\u0000","deployment":"d"}',
    "a folder elsewhere": b'{"version":"../../etc","deployment":"d"}',
    "no version": b'{"version":"","deployment":"d"}',
    "a long version": b'{"version":"%s","deployment":"d"}' % (b"9" * 60_000),
    "words for a terminal": b'{"version":"2","deployment":"d\\u001b[2Jversion 9: committed"}',
    "a number beyond all": b'{"version":"2","deployment":"d","attempt":1%s}' % (b"0" * 60),
}


@pytest.mark.parametrize("text", WISHES.values(), ids=WISHES.keys())
def test_a_wish_that_is_none_is_passed_over_and_root_forgets_nothing(board, text):
    board.fetch("3")
    board.want("3")
    before = take(board)
    board.fetch("2")
    wish(board, text)
    with pytest.raises(CorruptFile):
        take(board)
    assert read_upgrade(board.home) == before
    assert [path.name for path in board.home.glob(f"{RECORD}*")] == [RECORD]
    board.want("2")
    again = take(board)
    assert (again.state, names_all(again.reason, 2, 3)) == ("refused", True), again.reason


def test_what_dpkg_laid_is_not_left_for_an_older_version_that_was_signed_once(board):
    board.fetch("0.9", serial=7)
    board.want("0.9")
    record = take(board)
    assert (record.state, names_all(record.reason, "0.9", 1)) == ("refused", True), record.reason
    board.fetch("0.9", serial=7)
    assert take(board, by_hand=True).state == "committed"


IN_ORDER = ["0.9", "1~rc1", "1", "1-0.1", "1-2", "1a", "1+dfsg", "1.0~", "1.0", "1.2", "1.10", "2"]


def test_versions_have_the_order_of_dpkg():
    pairs = [(one, other) for one in IN_ORDER for other in IN_ORDER]
    assert {pair for pair in pairs if is_older(*pair)} == {
        (one, other) for place, other in enumerate(IN_ORDER) for one in IN_ORDER[:place]
    }
    assert not is_older("1", "1-0")
    assert not is_older("1-0", "1")


def test_reasons_are_one_line_that_a_terminal_shows_as_it_is(board):
    board.fetch("2")
    board.want("2")
    record = take(board)
    told = "no\x1b[2Jversion 9\ncommitted" + "x" * 10_000
    for found in (mark_rollback(record, told), apply_event(mark_rollback(record, told), "back", told)):
        assert found.reason.isprintable()
        assert found.reason.startswith("no?[2Jversion 9?committed")


def test_a_disk_that_became_full_by_what_was_laid_has_room_for_the_record_again(board, monkeypatch):
    def write(home, record, plainly=upgrade_state.write_upgrade):
        if (home / "2").exists():
            raise Unwritable("No space left on device")
        plainly(home, record)

    board.fetch("2")
    board.want("2")
    monkeypatch.setattr(upgrade_state, "write_upgrade", write)
    with pytest.raises(Unwritable):
        take(board)
    assert board.versions() == {"1", "2"}
    assert board.updater().resume().state == "superseded"
    assert board.versions() == {"1"}
