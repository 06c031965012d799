"""Split rounds as processes over mosquitto: live is replay bit for bit, and after kill -9 of any the run is whole."""

from __future__ import annotations

import signal

import psutil
import pytest

from edge_server.fleet import broker
from edge_server.journal.records import Rewound, RoundClosed, RoundOpened, UpdateAccepted, closed_rounds, valid
from tests.edge_server.processes import PATIENCE_S, Field, Fleet, final, folder_of, until
from tests.edge_server.textbook import require_equal

STEPS, ROUNDS = 30, 3
OPTIONS = f"period = {STEPS}, sparsity = 0.3, bits = 8, drop = 0.3"
pytestmark = [
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.skipif(broker.mosquitto() is None, reason="mosquitto is not installed"),
]


class Split(Field):
    """A field whose rounds are split, and long enough to be cut."""

    rounds = ROUNDS

    def sections(self) -> dict[str, str]:
        """Return the plan of every run here."""
        return {
            "algorithm": f'name = "fedsl"\noptions = {{ {OPTIONS} }}',
            "hyper": "batch_size = 16\nlearning_rate = 0.1",
            "evaluation": "every = 1",
            "round": "deadline_s = 120.0\nstep_deadline_s = 60.0",
        }

    def require_same_bits(self, name: str) -> None:
        """Check that a run is as if nothing had happened: every round, step and update once, and the replay's bits."""
        records, plan = self.records(name), self.plan(name)
        told = [(one.round, one.arrived, one.steps, one.missed) for one in closed_rounds(records)]
        assert told == [(number, ("a", "b"), STEPS, {}) for number in range(1, ROUNDS + 1)]
        accepted = [(one.device, one.round) for one in valid(records) if isinstance(one, UpdateAccepted)]
        assert len(accepted) == len(set(accepted)) == 2 * ROUNDS
        require_equal(final(folder_of(self.folder / name), ROUNDS), self.replayed(name, plan))


def trainer(fleet: Fleet, name: str) -> psutil.Process:
    """Return an agent's trainer."""
    [child] = psutil.Process(fleet.processes[name].pid).children()
    return child


@pytest.fixture(scope="module")
def site(fleet, tmp_path_factory) -> Split:
    """Return a broker with two agents that wait for a server."""
    return Split(fleet, tmp_path_factory.mktemp("field"))


def test_a_killed_server_begins_its_round_anew_and_ends_at_the_same_bits(site):
    """In the middle of the steps, and once more when an update of the round is stored."""
    name = "server"
    with site.server(name) as process:
        until(lambda: site.reached(name, 2, RoundOpened), "the second round")
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with site.server(name) as process:
        until(lambda: site.reached(name, 3, UpdateAccepted), "an update of the third round")
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with site.server(name) as process:
        assert process.wait(PATIENCE_S) == 0
    assert [one.round for one in site.records(name) if isinstance(one, Rewound)] != []
    site.require_same_bits(name)


def test_a_killed_broker_costs_nothing_but_time(site):
    """Another on the same port that remembers nothing."""
    name = "broker"
    with site.server(name) as process:
        until(lambda: site.reached(name, 2, RoundOpened), "the second round")
        site.fleet.replace_broker()
        assert process.wait(PATIENCE_S) == 0
    site.require_same_bits(name)


@pytest.mark.parametrize("victim", ["agent", "trainer"])
def test_a_killed_device_takes_part_again(site, victim):
    """What it had computed of its session is gone: it misses the steps that were served, and no round is lost."""
    name = victim
    with site.server(name) as process:
        until(lambda: site.reached(name, 1), "the first round's end")
        if victim == "agent":
            site.fleet.kill_agent("a")
            site.fleet.agent("a")
        else:
            trainer(site.fleet, "a").kill()
        assert process.wait(PATIENCE_S) == 0
    closed = closed_rounds(site.records(name))
    assert [(one.round, one.outcome, one.arrived, one.steps) for one in closed] == [
        (number, "aggregated", ("a", "b"), STEPS) for number in range(1, ROUNDS + 1)
    ]
    assert not any("b" in one.missed for one in closed)
    assert isinstance(closed[0], RoundClosed)
