"""The methods that FedSPU is compared with, over the wire: their bytes, their replays, and choices that outlive all."""

from __future__ import annotations

import pytest

from edge_server.journal.records import RoundOpened, UpdateAccepted, closed_rounds
from edge_server.replay.run import replay_plan
from shared.algorithms.subnetwork.ranked_pruning import MASK
from shared.algorithms.subnetwork.server_half import CHAIN
from tests.edge_server.fleets import Network, Site
from tests.edge_server.textbook import NAMES, SLOW, require_equal
from tests.test_fedspu import make

RANKED = ("hermes", "fedmp", "prunefl")
FJORD = 'widths = "0.25,0.5,1"'


def test_bytes_are_those_of_fedspu_at_equal_shares(tmp_path):
    """Both ways, headers included, within one in a hundred; of those that rank, from the second participation on."""
    carried = {}
    for method in ("fedspu", "fjord_fixed", "fjord", *RANKED):
        folder = tmp_path / method
        folder.mkdir()
        plan = make(folder, method, FJORD if method == "fjord" else "", rounds=2)
        closed = closed_rounds(replay_plan(plan, folder / "run")[1])
        carried[method] = [(sum(one.bytes_up.values()), sum(one.bytes_down.values())) for one in closed]
    for method, (first, second) in carried.items():
        assert second == pytest.approx(carried["fedspu"][1], rel=0.01), method
        if method in RANKED:
            assert first[1] > 1.2 * carried["fedspu"][0][1], "the whole model comes once"


@pytest.mark.parametrize("method", ["hermes", "fjord", "fedselect"])
def test_a_replay_is_the_live_run_and_its_record_the_same_for_any_number_of_processes(tmp_path, method):
    """With early stopping, and evaluation of what each device uses."""
    options = "early_stopping = true" + (f", {FJORD}, distil = true" if method == "fjord" else "")
    sections = {"round": "deadline_s = 900.0", "evaluation": "on_device = true", "more": SLOW, "rounds": 2}
    plan = make(tmp_path, method, options, **sections)
    ends = [
        replay_plan(plan, tmp_path / place / "run", workers=workers) for place, workers in (("one", 1), ("more", 3))
    ]
    one, more = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "more"))
    assert one == more
    assert ends[0][0].facts == ends[1][0].facts
    require_equal(ends[0][0].tree, ends[1][0].tree)
    require_equal(Site(Network(), plan, tmp_path / "live").play()[0].tree, ends[0][0].tree)


@pytest.mark.parametrize("kind", ["update", "checkpoint"])
def test_a_server_that_restarts_knows_what_devices_have_chosen(tmp_path, kind):
    """Its run ends as one that nobody interrupts, bit for bit."""
    plan = make(tmp_path, "hermes")
    expected, _ = Site(Network(), plan, tmp_path / "whole").play()
    here = Site(Network(), plan, tmp_path / "cut")

    def cut(written: object) -> bool:
        return written == 1 if kind == "checkpoint" else isinstance(written, UpdateAccepted) and written.round == 2

    state, records = here.play(lambda: here.serve_twice(cut))
    assert state.facts == expected.facts
    assert {key for key in state.facts if key.startswith(MASK)} == {MASK + name for name in NAMES}
    require_equal(state.tree, expected.tree)
    told = [record.assignments for record in records if isinstance(record, RoundOpened)]
    assert [any(CHAIN in one.values for one in round_.values()) for round_ in told[-2:]] == [False, False]
