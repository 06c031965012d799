"""Interrupted run resumes to the same rounds and model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.journal.runs import checkpoint_path
from edge_server.journal.sqlite import read_records
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from tests.edge_server.fleets import RUN, End, Network, Site
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.textbook import DEVICES, NAMES
from tests.naming import log_messages, naming


def make_plan(folder: Path, rounds: int = 3) -> Plan:
    """Return a plan with real training on a few examples."""
    path = write_plan(
        folder,
        rounds=rounds,
        model='name = "mlp"\noptions = { features = 8, hidden = 64, classes = 3 }',
        hyper="batch_size = 8\nlearning_rate = 0.2\nmomentum = 0.5",
        cohort="min_devices = 3",
        data=f"{write_examples(folder)}\nholdout = 0.2",
        evaluation="every = 1\non_device = true",
        more=f'[partition]\nkind = "even"\n{DEVICES}',
    )
    return load(path, folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> End:
    """Return the end of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Site(Network(), make_plan(folder), folder).play()


def require_same(end: End, expected: End) -> None:
    """Compare what matters of two runs: every bit of the model, every figure of every round but its seconds."""
    assert end[0].tree.keys() == expected[0].tree.keys()
    for key, leaf in expected[0].tree.items():
        assert torch.equal(end[0].tree[key], leaf), key
    assert [figures(one) for one in closed_rounds(end[1])] == [figures(one) for one in closed_rounds(expected[1])]
    evaluated = [[one for one in records if isinstance(one, Evaluated)][-1] for records in (end[1], expected[1])]
    assert evaluated[0] == evaluated[1]


def figures(closed: RoundClosed) -> tuple[object, ...]:
    """Return what a round came to."""
    return closed.round, closed.outcome, closed.arrived, closed.failed, closed.refused, closed.loss, closed.accuracy


def accepted(records: list[AnyRecord], number: int) -> list[str]:
    """Return whose updates of a round are stored."""
    return [one.device for one in records if isinstance(one, UpdateAccepted) and one.round == number]


MOMENTS: dict[str, Callable[[object], bool]] = {
    "the run has begun": lambda written: isinstance(written, RunOpened),
    "the first round has begun": lambda written: isinstance(written, RoundOpened) and written.round == 1,
    "the second round has begun": lambda written: isinstance(written, RoundOpened) and written.round == 2,
    "an update is stored": lambda written: isinstance(written, UpdateAccepted) and written.round == 2,
    "the first checkpoint is written, its round not closed": lambda written: written == 1,
    "a checkpoint is written, its round not closed": lambda written: written == 2,
    "a round is closed": lambda written: isinstance(written, RoundClosed) and written.round == 2,
    "the last round is closed": lambda written: isinstance(written, RoundClosed) and written.round == 3,
    "the devices have evaluated": lambda written: isinstance(written, Evaluated),
}


@pytest.mark.parametrize(
    ("moment", "devices_stay"),
    [(moment, True) for moment in MOMENTS] + [(moment, False) for moment in list(MOMENTS)[2:5]],
)
def test_a_cut_run_ends_as_if_nothing_had_happened(tmp_path, undisturbed, moment, devices_stay):
    """Nor is an update asked for again that was stored before the cut."""
    here = Site(Network(), make_plan(tmp_path), tmp_path)

    async def play() -> tuple[End, list[tuple[str, int]], set[tuple[str, int]]]:
        async with here.devices(*NAMES):
            await here.serve_until(MOMENTS[moment])
            stored = {
                (one.device, one.round) for one in read_records(tmp_path / RUN) if isinstance(one, UpdateAccepted)
            }
            if not devices_stay:
                for name in NAMES:
                    await here.stop(name)
                    await here.start(name)
            done = len(here.trained)
            end = await here.serve()
            return end, here.trained[done:], stored

    end, trained_after, stored = here.network.run(play())
    require_same(end, undisturbed)
    assert not stored & {(device, number) for device, number in trained_after if number <= 3}
    counted = Counter((one.device, one.round) for one in end[1] if isinstance(one, UpdateAccepted) and one.round <= 3)
    assert set(counted.values()) == {1}
    assert len([one for one in end[1] if isinstance(one, RunOpened)]) == 1
    assert isinstance(end[1][-1], RunClosed)


def test_a_run_that_has_ended_is_not_gone_on_with(tmp_path, undisturbed):
    """The same command once more changes nothing, needs no device and gives the same model."""
    here = Site(Network(), make_plan(tmp_path), tmp_path)

    async def play() -> tuple[End, End]:
        async with here.devices(*NAMES):
            first = await here.serve()
        return first, await here.serve()

    first, again = here.network.run(play())
    require_same(again, undisturbed)
    assert again[1] == first[1]


def test_a_run_is_not_gone_on_with_by_another_plan(tmp_path):
    """A model of another shape, or other rounds, would spoil its record."""

    async def play() -> None:
        store = SqliteStore(tmp_path / RUN)
        store.append(RunOpened(run=RUN, plan=make_plan(tmp_path)))
        store.close()
        await Site(Network(), make_plan(tmp_path, rounds=4), tmp_path).serve()

    with pytest.raises(ConfigError, match=naming("rounds", 3, 4)):
        Network().run(play())


@pytest.mark.parametrize("damage", ["damaged", "absent"])
@pytest.mark.parametrize("lost", [1, 2], ids=["the last", "both"])
def test_a_lost_checkpoint_sends_the_run_back_to_the_one_before(tmp_path, undisturbed, caplog, damage, lost):
    """It is set aside under another name, reported, recorded; the rounds since are done again and come out alike."""
    here = Site(Network(), make_plan(tmp_path), tmp_path)
    checkpoints = tmp_path / RUN / "checkpoints"

    async def play() -> End:
        async with here.devices(*NAMES):
            await here.serve_until(MOMENTS["a round is closed"])
        assert sorted(path.name for path in checkpoints.iterdir()) == [
            checkpoint_path(checkpoints, n).name for n in (1, 2)
        ]
        for number in (2, 1)[:lost]:
            path = checkpoint_path(checkpoints, number)
            path.unlink() if damage == "absent" else path.write_bytes(path.read_bytes()[:-5])
        async with here.devices(*NAMES):
            return await here.serve()

    end = here.network.run(play())
    require_same(end, undisturbed)
    rewinds = [one for one in end[1] if isinstance(one, Rewound)]
    assert [one.round for one in rewinds] == [2, 1][:lost]
    aside = sorted(path.name for path in checkpoints.iterdir() if "corrupt" in path.name)
    expected = [f"{checkpoint_path(checkpoints, number).name}.corrupt-1" for number in (1, 2)][2 - lost :]
    assert aside == (expected if damage == "damaged" else [])
    for number in (2, 1)[:lost]:
        [warning] = log_messages(caplog, checkpoint_path(checkpoints, number))
        assert (".corrupt-1" in warning) == (damage == "damaged")


def test_devices_that_stayed_take_part_in_rounds_that_are_done_again(tmp_path, undisturbed):
    """A server that lost its checkpoint asks for a round again that they have settled long ago."""
    here = Site(Network(), make_plan(tmp_path), tmp_path)

    async def play() -> End:
        async with here.devices(*NAMES):
            await here.serve_until(MOMENTS["a round is closed"])
            checkpoint_path(tmp_path / RUN / "checkpoints", 2).unlink()
            return await here.serve()

    require_same(here.network.run(play()), undisturbed)


def test_a_stored_update_that_rotted_while_the_server_was_away_is_asked_for_again(tmp_path, undisturbed, caplog):
    """Its size still holds, its digest does not: it must not count, and the round ends as if nothing had happened."""
    here = Site(Network(), make_plan(tmp_path), tmp_path)

    async def play() -> tuple[str, End]:
        async with here.devices(*NAMES):
            await here.serve_until(MOMENTS["an update is stored"])
            record = [
                one for one in read_records(tmp_path / RUN) if isinstance(one, UpdateAccepted) and one.round == 2
            ][-1]
            path = tmp_path / RUN / "updates" / record.device
            rotten = bytearray(path.read_bytes())
            rotten[-100] ^= 1
            path.write_bytes(rotten)
            return record.device, await here.serve()

    device, end = here.network.run(play())
    require_same(end, undisturbed)
    assert log_messages(caplog, device, 2)
