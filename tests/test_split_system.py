"""Split rounds as processes over mosquitto: live is replay bit for bit, also after kill -9 of any process."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from edge_server.journal.records import Rewound, RoundOpened, UpdateAccepted, closed_rounds, drop_void
from edge_server.rounds.split import session
from shared.runtime.phases import parse_phase
from tests.edge_server.processes import PATIENCE_S, Field, Fleet, final, folder_of, until
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto
from tests.naming import names_all

STEPS, ROUNDS = 30, 3
OPTIONS = f"period = {STEPS}, sparsity = 0.3, bits = 8, drop = 0.3"
pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]


class Split(Field):
    """A field whose rounds are split, and long enough to be cut."""

    rounds = ROUNDS
    log_level = "debug"

    def sections(self) -> dict[str, str]:
        """Return the plan of every run here."""
        return {
            "algorithm": f'name = "fedsl"\noptions = {{ {OPTIONS} }}',
            "hyper": "batch_size = 16\nlearning_rate = 0.1",
            "evaluation": "every = 1",
            "round": "deadline_s = 300.0\nstep_deadline_s = 120.0",
        }

    def bar(self, run: str) -> int:
        """Let a's trainer come no further than to the end of its session; return the round, 0 where none is open.

        It makes every file of its draft durable before the update is one, and waits for who should fill this one. With
        b held still, and half of the steps to come, it cannot be there yet.
        """
        agent = psutil.Process(self.fleet.processes["b"].pid)
        agent.suspend()
        try:
            for draft in (self.fleet.folder / "a" / "outbox").glob(".*@*[0-9]"):
                number = int(draft.name.rpartition("@")[2])
                if not self.has_served(run, number, STEPS // 2):
                    os.mkfifo(draft / "bar")
                    return number
        finally:
            agent.resume()
        return 0

    def has_served(self, run: str, number: int, step: int) -> bool:
        """Tell whether a server has taken a step of a round."""
        log = (self.folder / f"server-{run}.log").read_text()
        return re.search(rf" round={number} number={step} ", log) is not None

    def is_at_end(self, number: int) -> bool:
        """Tell whether a's trainer has ended the session of a round, and writes down what it came to."""
        lines = map(parse_phase, self.fleet.log("a").read_text().splitlines())
        phases = [line for line in lines if line and line.logger == "trainer"]
        begun = [at for at, line in enumerate(phases) if line.phase == "training"]
        last = phases[begun[-1] :] if begun else []
        return bool(last) and last[0].facts["round"] == str(number) and "encoding" in {line.phase for line in last}

    def require_same_bits(self, name: str) -> None:
        """Check that a run is as if nothing had happened: every round, step and update once, and the replay's bits."""
        records, plan = self.records(name), self.plan(name)
        told = [(one.round, one.arrived, one.steps, one.missed) for one in closed_rounds(records)]
        assert told == [(number, ("a", "b"), STEPS, {}) for number in range(1, ROUNDS + 1)]
        accepted = [(one.device, one.round) for one in drop_void(records) if isinstance(one, UpdateAccepted)]
        assert len(accepted) == len(set(accepted)) == 2 * ROUNDS
        require_equal(final(folder_of(self.folder / name), ROUNDS), self.replayed(name, plan)[0].tree)


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
def test_a_killed_device_does_its_session_again_and_ends_at_the_same_bits(site, victim):
    """Wherever it is: what it had computed is gone, and the server answers its steps as before."""
    name = victim
    with site.server(name) as process:
        until(lambda: site.has_served(name, 2, 9), "the middle of the second session")
        if victim == "agent":
            site.fleet.kill_agent("a")
            site.fleet.agent("a")
        else:
            trainer(site.fleet, "a").kill()
        assert process.wait(PATIENCE_S) == 0
    site.require_same_bits(name)


def test_a_trainer_that_is_killed_behind_its_last_step_does_its_session_again(site):
    """The server has nothing more to answer, but for what it has kept: the device would send its part as it came."""
    name = "last"
    with site.server(name) as process:
        number = until(lambda: site.bar(name), "a session that has begun")
        until(lambda: site.has_served(name, number, STEPS), "the last step")
        until(lambda: site.is_at_end(number), "the end of the session")
        trainer(site.fleet, "a").kill()
        assert process.wait(PATIENCE_S) == 0
    site.require_same_bits(name)
    lines = (site.folder / f"server-{name}.log").read_text().splitlines()
    assert [line for line in lines if names_all(line, "INFO", session.__name__, f"{number}: a")]
