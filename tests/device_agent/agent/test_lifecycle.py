"""The lifecycle table: every pair of phase and event is either in it or refused."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from device_agent.agent.lifecycle import TRANSITIONS, Event, Phase, follow
from tests.naming import naming

PHASES, EVENTS = get_args(Phase), get_args(Event)
# What a device does, told a second time and in another form than the table: (phase, event) -> phase.
EXPECTED = {
    ("idle", "task"): "fetching",
    ("fetching", "fetched"): "training",
    ("fetching", "committed"): "idle",
    ("fetching", "failed"): "idle",
    ("fetching", "superseded"): "idle",
    ("training", "committed"): "idle",
    ("training", "failed"): "idle",
    ("training", "superseded"): "idle",
}


@pytest.mark.parametrize(("phase", "event"), list(product(PHASES, EVENTS)))
def test_every_event_in_every_phase_moves_on_or_is_refused(phase: Phase, event: Event) -> None:
    expected = EXPECTED.get((phase, event))
    if expected:
        assert follow(phase, event) == expected
    else:
        with pytest.raises(ValueError, match=naming(repr(event), phase)):
            follow(phase, event)


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("'reboot'", "idle")):
        follow("idle", "reboot")


def test_the_table_has_every_phase_and_leads_to_no_other() -> None:
    assert set(TRANSITIONS) == set(PHASES)
    assert {phase for events in TRANSITIONS.values() for phase in events.values()} <= set(PHASES)


@pytest.mark.parametrize("phase", sorted(set(PHASES) - {"idle"}))
def test_a_failure_and_a_newer_task_lead_back_to_idle_from_every_phase(phase: Phase) -> None:
    assert follow(phase, "failed") == follow(phase, "superseded") == "idle"
