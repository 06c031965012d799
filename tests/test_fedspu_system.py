"""FedSPU as processes over mosquitto: what kill -9 of an agent leaves of its personal model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from device_agent.trainer.task_files import read_state
from edge_server.fleet import broker
from edge_server.journal.records import RunOpened, UpdateAccepted
from tests.edge_server.processes import PATIENCE_S, Field, until, waiting

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(broker.find_mosquitto() is None, reason="mosquitto is not installed"),
]


class Personal(Field):
    """A field in which one of two agents trains half of the neurons."""

    def sections(self) -> dict[str, str]:
        """Return the plan of every run here, whose rounds take long enough to be cut."""
        return {
            "algorithm": 'name = "fedspu"',
            "early_stopping": "",
            "hyper": "local_epochs = 30\nbatch_size = 8\nlearning_rate = 0.01",
            "evaluation": "every = 1",
            "optimizer": 'name = "clusters"\noptions = { keep = "0.5,1" }',
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Personal]:
    """Return a broker with two agents that wait for a server."""
    folder = tmp_path_factory.mktemp("personal")
    with waiting(folder, 'source = "digits"\nlimit = 120\nholdout = 0.2\nvalidation = 0.1') as fleet:
        yield Personal(fleet, folder)


@pytest.mark.parametrize("victim", ["a"])
def test_a_killed_agent_keeps_its_personal_model(site, victim):
    """kill -9 while it trains: the run and every loss of every device's own model are those of the replay, in which
    nobody dies."""
    with site.server(victim) as process:
        until(lambda: site.reached(victim, 3), "the middle of the run")
        site.fleet.kill_agent(victim)
        site.fleet.agent(victim)
        assert process.wait(PATIENCE_S) == 0
    site.require_whole(victim)
    records = site.records(victim)
    _, replayed = site.replayed(victim, site.plan(victim))
    assert _told(records) == _told(replayed)
    run = next(one.run for one in records if isinstance(one, RunOpened))
    state, _ = read_state(site.fleet.folder / victim / "state" / run)
    assert len(state.tree) == 4
    assert "stopping_loss" in state.facts


def _told(records):
    """Return what devices said of their training, and of their own models on what they validate with."""
    updates = [one for one in records if isinstance(one, UpdateAccepted)]
    assert all("validation_loss" in one.update.metrics for one in updates)
    return {(one.round, one.device): (one.update.loss, one.update.metrics) for one in updates}
