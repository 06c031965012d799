"""Hanging and vanished device processes over a real broker; rounds continue."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from edge_server.journal.records import RoundOpened, UpdateAccepted, closed_rounds
from tests.edge_server.processes import Field, until
from tests.machine import needs_mosquitto

DEADLINE_S = 2.0

pytestmark = [pytest.mark.broker, needs_mosquitto]


class Roof(Field):
    """A field whose rounds go on for ever and wait for nobody longer than a deadline."""

    rounds = 100_000

    def sections(self) -> dict[str, str]:
        """Return the plan of every run here."""
        return {"evaluation": "every = 0", "round": f"deadline_s = {DEADLINE_S}", "cohort": "min_devices = 1"}

    def arrived(self, name: str, number: int) -> tuple[str, ...] | None:
        """Return whose updates a round has, None while it is open."""
        return next((one.arrived for one in closed_rounds(self.records(name)) if one.round == number), None)

    def last(self, name: str) -> int:
        """Return the last round that has ended."""
        return max((one.round for one in closed_rounds(self.records(name))), default=0)

    def asked(self, name: str, device: str) -> list[int]:
        """Return the rounds that a device was given a task of."""
        opened = [one for one in self.records(name) if isinstance(one, RoundOpened)]
        return [one.round for one in opened if device in one.assignments]


@pytest.fixture
def roof(fleet, tmp_path) -> Iterator[Roof]:
    """Return a broker with two agents that wait for a server, and have two again after the test."""
    yield Roof(fleet, tmp_path)
    if fleet.processes["b"].poll() is not None:
        fleet.agent("b")


def test_a_device_hangs_comes_back_and_is_killed(roof):
    """While it hangs, a round costs the deadline; back, it does the newest of its tasks only; dead, it costs one more.

    Hanging is SIGSTOP: the broker takes it for connected, and its tasks pile up.
    """
    name, both, b_log = "run", ("a", "b"), roof.fleet.log("b")
    said_before = len(b_log.read_text())
    with roof.server(name) as process:
        until(lambda: roof.arrived(name, roof.last(name)) == both, "a round of both")
        b = roof.fleet.processes["b"]
        b.send_signal(signal.SIGSTOP)
        hung_at = roof.last(name)
        until(lambda: roof.last(name) >= hung_at + 4, "rounds without b")
        b.send_signal(signal.SIGCONT)
        back_at = roof.last(name)
        until(lambda: roof.arrived(name, roof.last(name)) == both, "b taking part again")
        roof.fleet.kill_agent("b")
        killed_at = roof.last(name)
        until(lambda: roof.last(name) >= killed_at + 4, "rounds after b's end")
        process.kill()
    rounds = closed_rounds(roof.records(name))
    without_b = [one for one in rounds if hung_at + 1 < one.round < back_at]
    assert without_b
    assert not any("b" in one.arrived for one in without_b)
    assert all(DEADLINE_S <= one.seconds < DEADLINE_S + 60 for one in without_b), "waited for b, but no longer"
    piled_up = {number for number in roof.asked(name, "b") if hung_at + 1 < number < back_at}
    assert len(piled_up) >= 2
    trained = re.findall(r" INFO \S+ \w+ run=\S+ round=(\d+) seconds=", b_log.read_text()[said_before:])
    assert trained
    assert not piled_up & set(map(int, trained)), "it did tasks of rounds that were over"
    stored = [one.round for one in roof.records(name) if isinstance(one, UpdateAccepted) and one.device == "b"]
    assert not piled_up & set(stored)
    assert len(stored) == len(set(stored))
    assert max(roof.asked(name, "b")) <= killed_at + 2, "only the round in which it died was waited for"
    assert not any("b" in one.arrived for one in rounds if one.round > killed_at + 2)
