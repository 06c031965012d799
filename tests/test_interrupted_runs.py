"""Runs that a server or a device interrupts, by method: models and choices are those of a run that nothing does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.trainer.task_files import read_state
from edge_server.journal.records import RoundClosed, UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan
from tests import test_fedspu, test_hcef, test_pruned_personalization, test_server_optimizers
from tests.edge_server.fleets import RUN, Network, Site
from tests.edge_server.textbook import NAMES, make_plan, require_equal

ERROR_FEEDBACK = 'name = "topk"\noptions = { share = 0.1, error_feedback = true }'
METHODS: dict[str, Callable[[Path], Plan]] = {
    "fedspu": test_fedspu.make,
    "hermes": lambda folder: test_fedspu.make(folder, "hermes"),
    "hcef": test_hcef.make,
    "pruned_personalization": test_pruned_personalization.make,
    "fedadam": lambda folder: test_server_optimizers.plan_of(folder, "fedadam"),
    "scaffold": lambda folder: test_server_optimizers.plan_of(folder, "scaffold"),
    "error feedback": lambda folder: make_plan(folder, codec=ERROR_FEEDBACK),
}
"""Methods with state of the server, of devices or of a codec beside the model."""


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory) -> tuple[Site, object, list[tuple[object, ...]]]:
    """Return a site whose run nothing interrupts, its final state and figures."""
    folder = tmp_path_factory.mktemp("whole")
    here = Site(Network(), METHODS[request.param](folder), folder)
    state, records = here.play()
    return here, state, figures(closed_rounds(records))


def figures(rounds: list[RoundClosed]) -> list[tuple[object, ...]]:
    return [(one.outcome, one.arrived, one.loss, one.accuracy, one.device_accuracy) for one in rounds]


@pytest.mark.parametrize("moment", ["an update is stored", "a checkpoint is written", "a device dies"])
def test_an_interrupted_run_ends_as_one_that_is_not(whole, tmp_path, moment):
    """In round 2, whose updates are done again or stored: on the server, and on each device's disk."""
    undisturbed, expected, rounds = whole
    here = Site(Network(), undisturbed.plan, tmp_path)

    def cut(written: object) -> bool:
        return written == 2 if "checkpoint" in moment else isinstance(written, UpdateAccepted) and written.round == 2

    def serve():
        return here.serve_while_one_dies("b", 2) if "dies" in moment else here.serve_twice(cut)

    state, records = here.play(serve, compute_s=0.3)
    assert state.facts == expected.facts
    require_equal(state.tree, expected.tree)
    assert figures(closed_rounds(records)) == rounds
    for name in NAMES:
        place, other = (site.folder / name / "state" / RUN for site in (here, undisturbed))
        assert place.exists() == other.exists()
        if place.exists():
            (own, memory), (same, kept) = read_state(place), read_state(other)
            assert own.facts == same.facts
            require_equal(own.tree, same.tree)
            require_equal(memory or {}, kept or {})
