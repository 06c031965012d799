"""The account of a disturbed run: what counts as lost, as done twice, as different."""

from __future__ import annotations

import io
import math

import pytest
import torch

from edge_server.cli.chaos import accounts_table, kills_table, total
from edge_server.journal.records import RoundClosed, RoundOpened, UpdateAccepted
from edge_server.trial.chaos.log_reader import LogLine
from edge_server.trial.chaos.study import Struck
from edge_server.trial.chaos.verify import Account, account, difference, trainings
from shared.protocol.messages import Assignment, Hyper, Update
from shared.runtime.text_table import write_text
from shared.tensors.tree import State

MODEL = State({"weight": torch.tensor([1.0, 2.0])})


def said(*words: str, name: str = "a") -> list[LogLine]:
    """Return what a trainer said: a phase, or `training:RUN:ROUND`."""
    lines = []
    for word in words:
        phase, _, about = word.partition(":")
        facts = dict(zip(("run", "round"), about.split(":"), strict=True)) if about else {}
        lines.append(LogLine("trainer", name, phase, facts))
    return lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["importing", "training:r:1", "committed", "training:r:2", "committed"], (0, 0)),
        (["training:r:1", "importing", "training:r:1", "committed"], (1, 0)),
        (["training:r:1", "importing", "training:r:1", "importing", "training:r:1", "committed"], (2, 0)),
        (["training:r:1", "committed", "training:r:1", "committed"], (0, 1)),
        (["training:r:1", "committed", "importing", "training:r:1", "committed"], (0, 1)),
        (["training:r:1", "failed", "training:r:1", "committed"], (0, 1)),
        (["training:r:1", "importing", "training:r:2", "committed", "training:s:1", "committed"], (0, 0)),
    ],
    ids=["undisturbed", "died", "died twice", "for nothing", "died when it was done", "failed", "another run"],
)
def test_a_training_begun_again_is_excused_only_by_a_trainer_that_died_of_it(words, expected):
    assert trainings(said(*words), "r") == expected


def test_two_devices_train_the_same_round_and_neither_does_it_again():
    lines = [one for pair in zip(said("training:r:1"), said("training:r:1", name="b"), strict=True) for one in pair]
    assert trainings(lines, "r") == (0, 0)


def records(*accepted: tuple[int, str], rounds: int = 2) -> list:
    """Return the journal of a run of two devices, with these updates."""
    told = dict.fromkeys("ab", Assignment(seed=1, hyper=Hyper()))
    kept: list = [RoundOpened(round=number, assignments=told) for number in (1, 2, 3)[:rounds]]
    for number, device in accepted:
        update = Update(run="r", round=number, device=device, params=None)
        kept.append(UpdateAccepted(round=number, device=device, update=update, bytes_up=0))
    done = [RoundClosed(round=number, outcome="aggregated", arrived=("a", "b"), seconds=1.0) for number in (1, 2)]
    return [*kept, *done]


WHOLE = ((1, "a"), (1, "b"), (2, "a"), (2, "b"))


def drawn_up(journal: list, lines: list[LogLine], rounds: int = 2, final: State = MODEL) -> Account:
    return account("r", journal, lines, rounds=rounds, final=final, expected=MODEL)


def test_a_whole_run_holds_and_what_it_refused_is_counted():
    """Also where the devices evaluated the final model afterwards, with updates of a round after the last."""
    lines = [
        LogLine("server", "edge-server", "duplicate", {"run": "r"}),
        LogLine("server", "edge-server", "late", {"run": "q"}),
    ]
    found = drawn_up(
        [*records(*WHOLE, (3, "a"), (3, "a"))], [*lines, *said("training:r:1", "importing", "training:r:1")]
    )
    assert (found.updates, found.accepted, found.duplicates, found.retrained) == (4, 4, 1, 1)
    assert found.holds


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("accepted", drawn_up(records(*WHOLE[:3]), [])),
        ("counted_twice", drawn_up(records(*WHOLE, WHOLE[0]), [])),
        ("trained_twice", drawn_up(records(*WHOLE), said("training:r:1", "committed", "training:r:1"))),
        ("rounds_lost", drawn_up(records(*WHOLE), [], rounds=3)),
        ("difference", drawn_up(records(*WHOLE), [], final=State({"weight": torch.tensor([1.0, 2.5])}))),
    ],
)
def test_each_fault_alone_is_enough_to_fail(field, found):
    assert not found.holds
    assert getattr(found, field) == {"accepted": 3, "difference": 0.5}.get(field, 1)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [([1.0, 2.0], 0.0), ([1.0, 1.75], 0.25), ([1.0, math.nan], math.inf), ([1.0, 2.0, 3.0], math.inf)],
)
def test_the_difference_of_models(leaf, expected):
    """What cannot be compared is infinitely different, as is a model that is not there."""
    assert difference(State({"weight": torch.tensor(leaf)}), MODEL) == expected
    assert difference(State(), MODEL) == math.inf


def test_the_tables_have_every_kill_and_the_sum_of_the_runs():
    """A row a phase with its sums; the sum of the runs takes the largest difference."""
    made = [("server", "storing"), ("broker", "storing"), ("server", "starting"), ("trainer", "training")]
    struck = [Struck(run="r", kind=kind, name=kind, phase=phase, marked=False) for kind, phase in made]
    runs = [drawn_up(records(*WHOLE), []), drawn_up(records(*WHOLE[:3]), [], final=State())]
    text = io.StringIO()
    write_text(text, kills_table(struck), accounts_table(runs))
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert ["storing", "1", "1", "2"] in rows
    assert ["all", "2", "0", "1", "1", "4"] in rows
    assert ["all", "7/8", "0", "0", "0", "0", "0", "inf"] in rows
    assert (total(runs).accepted, total(runs).difference) == (7, math.inf)
