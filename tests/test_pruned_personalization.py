"""Pruned personalization over the wire: memory, mosquitto and the embedded broker; what is personal stays at home."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from device_agent.trainer.task_files import read_state
from device_agent.trainer.workspace import Workspace
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import Evaluated, RoundOpened, UpdateAccepted, closed_rounds
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan, devices
from edge_server.replay.run import replay_plan, run_replay
from edge_server.replay.trace.transfer import export
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.errors import ConfigError
from shared.models.build import build_initial
from shared.protocol.topics import ALL_BELOW, ROOT
from shared.registry import build
from shared.tensors.tree import Mean, State, Tree
from shared.transport.presence import Session
from tests.edge_server.fleets import RUN, Network, Site
from tests.edge_server.textbook import NAMES, ROUNDS, SLOW, make_plan, require_equal
from tests.naming import naming

numbers = itertools.count()
HEADER_BYTES = 600
COUNT, BIASES = 32 * 9 + 90, 19
"""Of the linear layers."""


def make(folder: Path, method: str = "pruned_personalization", options: str = "prune = 0.6", **sections: str) -> Plan:
    """Return a plan of a small network of convolutions and linear layers on handwritten digits."""
    chosen = {
        "algorithm": f'name = "{method}"\noptions = {{ {options} }}',
        "model": 'name = "cnn"\noptions = { side = 8, width = 4, hidden = 9, classes = 10 }',
        "data": 'source = "digits"\nlimit = 90\nholdout = 0.2',
        "evaluation": "every = 0\non_device = true",
        "partition": 'kind = "shards"',
    }
    return make_plan(folder, **(chosen | sections))


def alone(plan: Plan) -> tuple[Tree, dict[str, Tree]]:
    """Return what a run comes to in one loop, without messages and files: the shared part and every device's own."""
    fleet, algorithm, workspace = devices(plan), build(ALGORITHMS, plan.algorithm, "algorithm"), Workspace()
    state = algorithm.init(build_initial(plan.model, plan.seed), plan.seed)
    kept = {device.name: State() for device in fleet}
    for number in range(1, plan.rounds + 1):
        cohort = Cohort(tuple(sorted(kept)), plan.hyper, plan.seed, plan.rounds)
        told, results = algorithm.assign(state, cohort, {}, number), {}
        for place, name in enumerate(kept):
            own = workspace.batches(device_data(plan, fleet, place), told[name], lambda: False)
            down = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, name, told[name]).items()}
            kept[name], results[name] = algorithm.local(workspace.model(plan.model), kept[name], down, own, told[name])
        mean = Mean()
        for name in sorted(results):
            mean = algorithm.absorb(mean, name, told[name], results[name])
        state = algorithm.aggregate(state, mean)
    return state.tree, {name: one.tree for name, one in kept.items()}


def own_part(folder: Path, device: str) -> Tree:
    """Return what lies on a device's disk."""
    return read_state(folder / device / "state" / RUN)[0].tree


def require_same(here: Site, tree: Tree) -> None:
    """Compare the shared part and every device's own with the loop's, bit for bit."""
    shared, own = alone(here.plan)
    require_equal(tree, shared)
    for device in NAMES:
        require_equal(own_part(here.folder, device), own[device])


@pytest.fixture
def here(network, tmp_path) -> Site:
    """Return a site of its own on the network, so that tests do not hear one another."""
    return Site(network, make(tmp_path), tmp_path, name=f"pp{next(numbers)}")


def test_a_run_is_the_loop_bit_for_bit_and_nothing_personal_is_heard(here):
    """All that any client could hear on the site's topics, status to frames; bytes of updates by the formula."""
    heard: list[bytes] = []

    async def spy(inbox) -> None:
        async for _, data in inbox:
            heard.append(bytes(data))

    async def play():
        session = Session(here.folder / "spy", "spy", "elsewhere", "x")
        async with (
            here.network.connected(f"{here.name}.spy", session.presence) as transport,
            transport.subscribe(f"{ROOT}/{here.name}/{ALL_BELOW}") as inbox,
        ):
            listening = asyncio.create_task(spy(inbox))
            async with here.devices(*NAMES):
                ended = await here.serve()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            return ended

    state, records = here.network.run(play())
    assert [closed.arrived for closed in closed_rounds(records)] == ROUNDS * [NAMES]
    assert not any(closed.refused for closed in closed_rounds(records))
    require_same(here, state.tree)
    updates = [record.update for record in records if isinstance(record, UpdateAccepted) and record.update.params]
    bytes_up = 4 * (COUNT - int(0.6 * COUNT)) + -(-COUNT // 8) + 4 * BIASES
    assert all(0 < update.params.size - bytes_up <= HEADER_BYTES for update in updates)
    travelled = b"".join(heard)
    assert len(travelled) > ROUNDS * len(NAMES) * 4 * COUNT
    begun = build_initial(here.plan.model, here.plan.seed).tree()
    for device in NAMES:
        for key, leaf in own_part(here.folder, device).items():
            assert key.startswith(("personal/", "momentum/"))
            for numbers_of in (leaf.flatten(), begun[key.partition("/")[2]].flatten()):
                pairs = [numbers_of[place : place + 2].numpy().tobytes() for place in range(len(numbers_of) - 1)]
                assert not any(pair in travelled for pair in pairs if any(pair))


@pytest.mark.parametrize("method", ["pruned_personalization", "fedalt", "pruning_only"])
def test_a_replay_under_the_optimizer_is_the_same_for_any_number_of_processes(tmp_path, method):
    """Byte for byte; each device gets a share of its own, and its own network is what is evaluated."""
    sections = {"round": "deadline_s = 900.0", "more": SLOW}
    sections["optimizer"] = 'name = "bandwidth"\noptions = { deadline_s = 9.0 }'
    plan = make(tmp_path, method, "personal_steps = 2", **sections)
    ends = [
        replay_plan(plan, tmp_path / place / "run", workers=workers) for place, workers in (("one", 1), ("more", 3))
    ]
    (state, records), (again, others) = ends
    assert records == others
    require_equal(state.tree, again.tree)
    assert [closed.arrived for closed in closed_rounds(records)] == ROUNDS * [NAMES]
    [evaluated] = [record for record in records if isinstance(record, Evaluated)]
    assert set(evaluated.by_device) == set(NAMES)
    opened = [one for one in records if isinstance(one, RoundOpened)]
    shares = {told.values["prune"] for told in opened[-1].assignments.values()}
    sizes = {one.update.params.size for one in records if isinstance(one, UpdateAccepted) and one.round == ROUNDS}
    if method == "fedalt":
        assert (shares, len(sizes)) == ({0.0}, 1)
    else:
        assert len(shares) > 1
        assert len(sizes) > 1


def test_a_server_that_has_no_whole_model_is_not_asked_to_evaluate_one(tmp_path):
    """Before anything is started; what to set instead is said. Where all is shared, it may be."""
    with pytest.raises(
        ConfigError, match=naming("pruned_personalization", "evaluation.every", "evaluation.devices_every")
    ):
        make(tmp_path, evaluation="every = 1")
    assert make(tmp_path, "pruning_only", "", evaluation="every = 1").evaluation.every == 1


def test_the_plan_that_comes_with_it_can_be_read(data_root):
    """Its network is the paper's: 421,642 parameters."""
    plan = load(Path(__file__).parent.parent / "deploy/plans/pruned_personalization.toml", data_root)
    assert sum(leaf.numel() for leaf in build_initial(plan.model, 1).layers.parameters()) == 421_642
    assert len(devices(plan)) == 10


def test_measured_steps_are_plain_ones(tmp_path):
    """What an optimizer divides by is the time of a step on one batch, not of the method's own."""
    plan = make(tmp_path, measure="seconds = 0.01", evaluation="every = 0")
    here = Site(Network(), plan, tmp_path)

    _, records = here.play()
    measured = next(record for record in records if type(record).__name__ == "Measured")
    assert set(measured.by_device) == set(NAMES)
    assert torch.tensor([step.steps for step in measured.by_device.values()]).min() >= 5


def test_a_replayed_device_is_charged_for_the_steps_it_takes_and_its_trace_for_as_many(tmp_path):
    """A second a step; not for the epochs that its batches could last. The trace of it is the run again."""
    cost = "compute = { kind = 'ranges', hertz = 1e9, cycles_per_step = 1e9 }"
    more = "\n".join(f'[[device]]\nname = "{name}"\n{cost}' for name in NAMES)
    options = "personal_steps = 3, global_steps = 2, warmup_steps = 1"
    make(tmp_path, options=options, more=more, evaluation="every = 0")
    [(run, records)] = run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0, 1)
    seconds = [cost.compute_s for told in costs_by_round(records).values() for cost in told.values()]
    assert seconds == ROUNDS * len(NAMES) * [6.0]
    export(tmp_path / "runs", run.name, tmp_path / "trace", tmp_path)
    [(_, again)] = run_replay(tmp_path / "trace", tmp_path, tmp_path / "more", 0, 1)
    assert [cost.compute_s for told in costs_by_round(again).values() for cost in told.values()] == seconds
