"""State machine of a device's split session: every state with every event."""

from __future__ import annotations

from typing import get_args

import pytest

from edge_server.rounds.split.device_session import PATIENCE, TRANSITIONS, DeviceSession, Event, StepState
from shared.protocol.messages import BLOCK_BYTES
from shared.transfer.sender import Sender
from tests.naming import naming

STATES, EVENTS = get_args(StepState), get_args(Event)
SPEAKS = {
    "return": {"awaited": "awaited", "absent": "awaited"},
    "offer": dict.fromkeys(("awaited", "absent", "offered", "delivered"), "offered"),
    "deliver": {"offered": "delivered"},
    "refuse": {"offered": "refused", "delivered": "refused"},
    "close": {
        "delivered": "awaited",
        "refused": "awaited",
        "awaited": "absent",
        "absent": "absent",
        "offered": "absent",
    },
    "close overdue": dict.fromkeys(("awaited", "absent", "offered", "refused"), "absent"),
    "fail": dict.fromkeys(STATES, "failed"),
}
"""By event, what the rules say of it; that a device speaks changes nothing where it has offered."""
SPEAKS["return"] |= {state: state for state in ("offered", "delivered", "refused")}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_state_with_every_event_goes_where_the_rules_say_or_is_a_fault(state: StepState, event: Event) -> None:
    session = DeviceSession("a", state=state)
    if state in SPEAKS[event]:
        session.follow(event)
        assert session.state == SPEAKS[event][state]
    else:
        with pytest.raises(ValueError, match=naming(event, "a", state)):
            session.follow(event)
        assert session.state == state


def test_every_state_is_reached_from_the_first_and_only_failing_is_for_good() -> None:
    reached, new = set[str](), {"awaited"}
    while new:
        reached |= new
        new = {following for state in new for following in TRANSITIONS[state].values()} - reached
    assert reached == set(STATES) == set(TRANSITIONS)
    assert {state for state in STATES if set(TRANSITIONS[state].values()) <= {state}} == {"failed"}


@pytest.mark.parametrize("state", [state for state in STATES if state != "failed"])
@pytest.mark.parametrize("late", range(PATIENCE + 2))
def test_a_step_closes_in_every_state_and_counts_once(state: StepState, late: int) -> None:
    """It is answered or missed; only who was waited for in vain is later than before."""
    if state == "awaited" and late >= PATIENCE:
        return  # nobody waits for one that is overdue
    session = DeviceSession("a", state=state, step=3, late=late, delivered=b"digest")
    was_waited_for = session.is_waited_for
    session.close(3)
    took_part = state == "delivered"
    assert (session.missed, session.answers.last) == ((0, 3) if took_part else (1, 0))
    assert session.late == (0 if took_part else late + was_waited_for)
    assert session.step == (4 if state in {"delivered", "offered", "refused"} else 3), (
        "who has not offered is told later"
    )
    assert session.is_waited_for == (took_part or (state == "refused" and late < PATIENCE))


def test_one_that_failed_keeps_nothing_and_is_waited_for_no_more() -> None:
    session = DeviceSession("a", state="delivered", features={})
    session.answers.serve(1, b"digest")
    session.fail()
    assert (session.features, session.receiver, session.gradient, session.answers.last) == (None, None, None, 0)
    assert not session.is_alive
    assert not session.is_waited_for


@pytest.mark.parametrize(("at", "waiting"), [(1, [0]), (2, []), (3, [])])
def test_a_gradient_goes_with_the_features_of_the_next_step_but_not_with_those_of_one_before(
    at: int, waiting: list[int]
) -> None:
    """Step 2 was served: who delivers one before it has begun anew, and may lack the gradient that it is sent."""
    session = DeviceSession("a", features={}, at=at, gradient=Sender.of_parts([memoryview(b"gradient")], BLOCK_BYTES))
    session.answers.serve(2, b"digest")
    session.pending.add(0, 1)
    assert session.take_features() == {}
    assert session.features is None
    assert (session.gradient is not None, list(session.pending)) == (bool(waiting), waiting)
