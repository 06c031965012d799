"""Rounds do not wait for slow devices, lost devices or late updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import torch

from edge_server.journal.records import RoundOpened, UpdateAccepted
from shared.protocol.messages import Update, Want
from tests.edge_server.harness import Puppet, Site, beginning, frame, moved, packed, site, update_for

pytestmark = pytest.mark.virtual_time

OVER = "size = 2\nover_selection = 0.5\nmin_devices = 4"


async def asked(here: Site, puppets: dict[str, Puppet], number: int) -> list[Puppet]:
    """Return the devices that the server chose for a round, in order of name."""
    while not (opened := [one for one in here.store.records() if isinstance(one, RoundOpened) and one.round == number]):
        assert not here.run.done()
        await asyncio.sleep(0.1)
    return [puppets[name] for name in sorted(opened[-1].assignments)]


async def fleet(here: Site, names: Iterable[str]) -> dict[str, Puppet]:
    """Connect devices."""
    return {name: await here.device(name) for name in names}


def model(here: Site) -> torch.Tensor:
    """Return one leaf of the model's first parameters."""
    return next(iter(beginning(here.plan).values()))


async def test_over_selection_ends_a_round_without_the_slowest(tmp_path):
    """Three of four are asked for two updates; the third is late, also while the next round is open, and moves nothing.

    The next round's task for the straggler is another: what it answers to that one counts.
    """
    async with site(tmp_path, rounds=2, cohort=OVER, round="deadline_s = 60.0") as here:
        puppets = await fleet(here, "abcd")
        first = await asked(here, puppets, 1)
        assert len(first) == 3
        tasks = {puppet.name: await puppet.task() for puppet in first}
        for puppet in first[:2]:
            await puppet.answer(tasks[puppet.name], moved(here.plan, 0.5))
        second = await asked(here, puppets, 2)
        late = await first[2].answer(tasks[first[2].name], moved(here.plan, 9.0))
        assert (late.verdict, late.round) == ("late", 1)
        order = sorted(second, key=lambda puppet: puppet is not first[2])  # a straggler that is asked comes first
        for puppet in order[:2]:
            assert (await puppet.answer(await puppet.task(), moved(here.plan, 0.25))).verdict == "accepted"
        state, rounds = await here.ended()
        leaf = next(iter(state.tree.values()))
        torch.testing.assert_close(leaf, model(here) + 0.75, rtol=0, atol=1e-6)
        stored = [(one.round, one.device) for one in here.store.records() if isinstance(one, UpdateAccepted)]
        assert stored == [(1, puppet.name) for puppet in first[:2]] + [(2, puppet.name) for puppet in order[:2]]
        assert [(len(closed.arrived), closed.seconds < 1) for closed in rounds] == [(2, True), (2, True)]


@pytest.mark.parametrize(("fail", "arrived"), [(1, 2), (2, 1), (3, 0)])
async def test_those_asked_in_addition_stand_in_for_those_who_cannot(tmp_path, fail, arrived):
    """As many answers as there may be, and not a second of waiting for those that cannot come."""
    rule = 'deadline_s = 60.0\non_missed = "continue"'
    async with site(tmp_path, rounds=1, cohort=OVER, round=rule) as here:
        puppets = await fleet(here, "abcd")
        for place, puppet in enumerate(await asked(here, puppets, 1)):
            task = await puppet.task()
            if place < fail:
                await puppet.offer(update_for(task, b"", params=None, failure="no memory"))
            else:
                await puppet.answer(task, moved(here.plan, 0.5))
        closed = (await here.ended())[1][0]
    assert (len(closed.arrived), len(closed.failed)) == (arrived, fail)
    assert closed.outcome == ("aggregated" if arrived else "missed")
    assert closed.seconds < 1


async def test_over_selection_does_not_lengthen_a_round_beyond_its_deadline(tmp_path):
    """Two of the three asked are silent: one update is there when the time is up, and it counts."""
    async with site(tmp_path, rounds=1, cohort=OVER, round="deadline_s = 20.0") as here:
        puppets = await fleet(here, "abcd")
        puppet = (await asked(here, puppets, 1))[0]
        await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        closed = (await here.ended())[1][0]
    assert len(closed.arrived) == 1
    assert closed.seconds == pytest.approx(20.0)


async def test_a_device_that_leaves_frees_its_window_for_others(tmp_path):
    """Sixteen share the server's window of 48 frames, three each; one is left, and is asked for more at once.

    A device that comes back is asked for what lacks.
    """
    wide = 'name = "mlp"\noptions = { hidden = 700 }'
    rules = {"cohort": "min_devices = 16", "round": "deadline_s = 60.0\nquorum = 0.1"}
    async with site(tmp_path, rounds=1, model=wide, **rules) as here:
        puppets = await fleet(here, [f"d{number:02d}" for number in range(16)])
        data = packed(moved(here.plan, 0.5))
        updates = {name: update_for(await puppet.task(), data) for name, puppet in puppets.items()}
        for name, puppet in puppets.items():
            await puppet.say(updates[name])
        stays, leaver = puppets.pop("d00"), puppets["d01"]
        shared_windows = await windows(stays, updates["d00"], data)
        for puppet in puppets.values():
            await puppet.status(online=False)
        own_windows = await windows(stays, updates["d00"], data)
        await leaver.heard()  # what it was asked for before it left
        await leaver.status(online=True, session=2)
        assert (await leaver.offer(updates["d01"], data)).verdict == "accepted"
    assert max(shared_windows) <= 3
    assert max(own_windows) > 4


async def windows(puppet: Puppet, update: Update, data: bytes) -> list[int]:
    """Send what a device is asked for, some times over; return how many frames it was asked for each time."""
    counts = []
    for _ in range(5):
        want = await puppet.heard()
        assert isinstance(want, Want)
        blocks = [block for start, stop in want.ranges for block in range(start, stop)]
        counts.append(len(blocks))
        for block in blocks:
            assert update.params
            await puppet.say(frame(update.params, block, data))
    return counts
