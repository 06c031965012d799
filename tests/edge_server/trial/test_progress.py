"""What a terminal and a pipe are told of a run while it goes on."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from edge_server.journal.records import AnyRecord, Gossiped, LeftOut, RoundClosed, RoundOpened
from edge_server.trial.progress import Display
from shared.protocol.messages import Assignment, Hyper
from tests.naming import names_all

GONE = "ConfigError: data: path '/srv/examples': No such file"


def shown(*records: AnyRecord, is_terminal: bool = False, site: str = "") -> str:
    """Return what is written of a run's records."""
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=is_terminal, width=400, color_system=None), 5, site)
    for record in records:
        display.tell(record)
    return out.getvalue()


def missed(failed: dict[str, str], asked: tuple[str, ...] = ("a", "b", "c")) -> list[AnyRecord]:
    """Return the records of a round without a model."""
    return [
        RoundOpened(round=1, assignments={name: Assignment(seed=1, hyper=Hyper()) for name in asked}),
        RoundClosed(round=1, outcome="missed", arrived=(), failed=failed, seconds=1.0),
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_missed_round_names_its_most_frequent_cause_and_the_devices(is_terminal):
    """The line said how many had failed, and only `show` why."""
    said = shown(*missed({"a": GONE, "b": GONE, "c": "TaskFailed: fan"}), is_terminal=is_terminal)
    assert names_all(said, "1/5", 0, "a, b", GONE, 1, "1.00 s")
    assert "fan" not in said


def test_devices_that_did_not_answer_and_nobody_to_ask_are_causes_too():
    assert names_all(shown(*missed({})), 0, "a, b, c")
    assert shown(*missed({}, asked=())) != shown(*missed({}))
    left_out = LeftOut(device="a", instance="1", cause=GONE, round=1, at=1.0)
    assert names_all(shown(left_out), "a")
    silent = LeftOut(device="a", instance="1", cause="not a word of it", round=1, at=1.0, silent=True)
    assert names_all(shown(silent), "a", "not a word of it")


def test_where_devices_alone_evaluate_a_round_shows_their_figure():
    end = RoundClosed(round=2, outcome="aggregated", arrived=("a",), seconds=1.0, device_accuracy=0.5)
    assert names_all(shown(end), "accuracy on devices before it 0.5000")
    assert "on devices" not in shown(msgspec.structs.replace(end, accuracy=0.25))


def test_after_some_misses_in_a_row_it_says_what_to_do():
    """Once, and again only after a round that was not missed."""
    again = missed({"a": GONE})
    assert "device-agent doctor" not in shown(*again * 2)
    assert shown(*again * 9).count("device-agent doctor") == 1


def test_of_several_sites_every_line_says_whose_it_is_and_who_mixed():
    """A terminal has bars for the rounds, and is told of those who were missing alone."""
    whole = Gossiped(round=2, on=("barn", "yard"), seconds=0.25)
    torn = Gossiped(round=4, on=("barn",), off={"yard": "deadline"}, seconds=60.0)
    first, second = shown(whole, torn, site="roof").splitlines()
    assert names_all(first, "roof", "barn, yard", "0.25 s")
    assert names_all(second, "roof", "barn", "60.00 s", "yard", "deadline")
    assert shown(whole, site="roof", is_terminal=True) == ""
    assert names_all(shown(torn, site="roof", is_terminal=True), "yard", "deadline")
    assert names_all(shown(*missed({}), site="roof"), "roof", "1/5")
