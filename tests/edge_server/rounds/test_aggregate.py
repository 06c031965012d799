"""Aggregation: outliers beyond the round's median are left out and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge_server.cli.commands import explain_shortfall
from edge_server.journal.records import Rewound, RoundClosed, RoundOpened, RunClosed, closed_rounds
from edge_server.replay.run import replay_plan
from edge_server.rounds.aggregate import lower_median
from edge_server.rounds.check_plan import load
from shared.algorithms.fedavg import require_finite_loss
from shared.errors import Diverged
from shared.runtime.executor import background
from shared.tensors.tree import State, tree_norm
from tests.edge_server.harness import Puppet, Site, moved, site, update_for, virtual, write_examples, write_plan
from tests.naming import log_messages, names_all, naming

pytestmark = pytest.mark.virtual_time

COHORT = "min_devices = 3"
HONEST = {"a": 0.5, "b": 0.25}


async def rounds_with(here: Site, *, by: float = 0.5, **claims: Any) -> tuple[State, list[RoundClosed]]:
    """Let two honest devices and a third one do every round; `by` is how far that moves every parameter."""
    puppets = {name: await here.device(name) for name in (*HONEST, "c")}
    for _ in range(here.plan.rounds):
        for name, puppet in puppets.items():
            task = await puppet.task()
            if name == "c":
                await puppet.answer(task, moved(here.plan, by), **claims)
            else:
                await puppet.answer(task, moved(here.plan, HONEST[name]), num_examples=10, weight=10.0)
    return await here.ended()


def play(folder, *, rounds: int = 1, rule: str = "deadline_s = 30.0", **third: Any) -> tuple[State, list[RoundClosed]]:
    async def whole() -> tuple[State, list[RoundClosed]]:
        async with site(folder, rounds=rounds, cohort=COHORT, round=rule) as here:
            return await rounds_with(here, **third)

    return virtual(whole())


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> State:
    """Return the model of the two honest devices alone."""

    async def whole() -> State:
        async with site(tmp_path_factory.mktemp("honest"), rounds=1, cohort="min_devices = 2") as here:
            puppets = {name: await here.device(name) for name in HONEST}
            for name, puppet in puppets.items():
                by = HONEST[name]
                await puppet.answer(await puppet.task(), moved(here.plan, by), num_examples=10, weight=10.0)
            return (await here.ended())[0]

    return virtual(whole())


@pytest.mark.parametrize("by", [3e38, 1e30, 1e4, -1e4])
def test_an_update_far_beyond_the_median_changes_no_bit_of_the_others_model(tmp_path, honest, caplog, by):
    """One of 3e38 voided every round with its sender accepted, one of 1e30 ruined the model for good."""
    state, [closed] = play(tmp_path, by=by, num_examples=10, weight=10.0)
    assert all(torch.equal(state.tree[key], leaf) for key, leaf in honest.tree.items())
    assert (closed.outcome, closed.arrived) == ("aggregated", ("a", "b"))
    assert names_all(closed.failed["c"], "round.most_norm")
    assert log_messages(caplog, 1, "c", "round.most_norm")


@pytest.mark.parametrize("by", [0.5, 5.0, -3.0])
def test_an_update_within_the_bound_counts(tmp_path, by):
    """The bound is generous: devices differ."""
    _, [closed] = play(tmp_path, by=by, num_examples=10, weight=10.0)
    assert closed.arrived == ("a", "b", "c")
    assert not closed.failed


@pytest.mark.parametrize(
    ("claims", "named"),
    [
        ({"num_examples": 10, "weight": 1e12}, ("weight", 1e12, 1e-06, 10)),
        ({"num_examples": 10**12, "weight": 1e12}, (10**12, 100, 10)),
        ({"num_examples": 0, "weight": 2.0}, ("weight", 2.0)),
    ],
)
def test_a_claimed_weight_does_not_take_the_model_over(tmp_path, honest, claims, named):
    """A weight is at most the examples, and these at most a hundred times those of the others."""
    state, [closed] = play(tmp_path, by=-0.5, **claims)
    assert all(torch.equal(state.tree[key], leaf) for key, leaf in honest.tree.items())
    assert names_all(closed.failed["c"], *named)


def test_a_plan_may_set_no_bound(tmp_path):
    """Then the sum is what it is; whoever makes it overflow is named and left out, and the others' round counts."""
    rule = 'deadline_s = 30.0\nmost_norm = 0\nmost_examples = 0\non_missed = "continue"'
    state, [closed] = play(tmp_path, by=3e38, num_examples=1000, weight=1000.0, rule=rule)
    assert (closed.outcome, closed.arrived, closed.refused) == ("aggregated", ("a", "b"), {})
    assert set(closed.failed) == {"c"}
    assert all(torch.isfinite(leaf).all() for leaf in state.tree.values())


DIVERGED = "Diverged: training has diverged, the loss of step 3 is nan: lower hyper.learning_rate"


async def serve(here: Site, puppet: Puppet, first: int, times: int) -> None:
    """Do every round, but diverge `times` times in round `first`."""
    while True:
        task = await puppet.task()
        if task.round == first and times:
            times -= 1
            await puppet.offer(update_for(task, b"", params=None, failure=DIVERGED))
        else:
            await puppet.answer(task, moved(here.plan, 0.5))


@pytest.mark.parametrize(("times", "outcome"), [(2, "finished"), (3, "finished"), (99, "diverged")])
async def test_a_run_that_diverges_goes_back_to_its_last_good_model_once(tmp_path, times, outcome):
    """After three tries; where it comes no further from there it ends, and says on which device, at which step."""
    async with site(tmp_path, rounds=6, cohort="min_devices = 1") as here:
        async with background(serve(here, await here.device("a"), 5, times)):
            await here.ended()
        records = here.store.records()
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == outcome
    back = [one.round for one in records if isinstance(one, Rewound) and not one.missed]
    assert back == ([] if times < 3 else [3]), "to the state after round 2, which is older than the last two"
    if outcome == "diverged":
        assert DIVERGED in end.cause
        assert names_all(explain_shortfall(records), 3, DIVERGED)
    else:
        assert [one.round for one in closed_rounds(records)] == [1, 2, 3, 4, 5, 6]
        assert not explain_shortfall(records)


async def test_training_that_diverges_from_the_initial_model_is_not_repeated(tmp_path):
    """The same devices would get the same task, and each would say the same again."""
    async with site(tmp_path, rounds=6, cohort="min_devices = 1") as here:
        async with background(serve(here, await here.device("a"), 1, 99)):
            await here.ended()
        records = here.store.records()
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == "diverged"
    assert end.cause.count(DIVERGED) == 1
    assert len([one for one in records if isinstance(one, RoundOpened)]) == 1


def test_a_rate_that_makes_training_diverge_is_named_with_device_step_and_remedy(tmp_path):
    """It was told as trouble with links, in a run that was `finished`."""
    fleet = '[[device]]\nname = "a"\n[[device]]\nname = "b"'
    model = 'name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }'
    hyper = "batch_size = 4\nlearning_rate = 1e30"
    keys = {"rounds": 3, "model": model, "hyper": hyper, "data": write_examples(tmp_path)}
    plan = load(write_plan(tmp_path, more=fleet, **keys), tmp_path)
    _, records = replay_plan(plan, tmp_path / "run")
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == "diverged"
    assert names_all(end.cause, "a", "b", Diverged.__name__, 2, "nan", "hyper.learning_rate")


def test_a_loss_that_is_none_before_any_step_is_not_laid_to_the_devices_rate():
    """The received model, the examples or the loss is the cause: no step has moved the weights."""
    with pytest.raises(Diverged, match=naming("nan", "model", "examples", "task.loss")) as caught:
        require_finite_loss(float("nan"), 1)
    assert "learning_rate" not in str(caught.value)
    with pytest.raises(Diverged, match=naming("hyper.learning_rate", "task.loss")):
        require_finite_loss(float("inf"), 2)


def test_medians_and_norms():
    """Of two in the middle the lower, so that one of two cannot be the measure; no device that sent zeros counts."""
    assert lower_median([]) == 0
    assert lower_median([0.0, 5.0, 1e30]) == 5.0
    assert lower_median([3.0, 1.0, 2.0]) == 2.0
    big = {"w": torch.full((4,), 1e30), "b": torch.tensor([3, 4])}
    assert tree_norm(big) == float("inf")
    assert tree_norm({"w": torch.tensor([3.0]), "h": torch.tensor([4.0], dtype=torch.float16)}) == 5.0
