"""The device half: which weights are held, what each phase moves and what it leaves alone."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from shared.algorithms.personal import sparse_update
from shared.algorithms.personal.pruned_personalization import fedalt, pruned_personalization
from shared.algorithms.personal_model import MODEL_DRAW, MODEL_SEED
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.models.build import DRAW, build_blank, build_initial
from shared.protocol.messages import Assignment, Spec
from shared.tensors.tree import State
from tests.shared.algorithms.sessions import CNN, FLEET, HYPER, SEED, Own, copied, network, pictures, play

COUNT = 9 * 32 + 3 * 9
VALUES = {"weights": COUNT, MODEL_SEED: SEED, MODEL_DRAW: DRAW}


def told_of(hyper=HYPER, **values):
    return Assignment(seed=3, hyper=msgspec.structs.replace(hyper, local_epochs=10), values={**VALUES, **values})


def down(spec=CNN, seed=SEED, layers="79"):
    return {key: leaf.clone() for key, leaf in build_initial(spec, seed).tree().items() if key[0] in layers}


def do(algorithm, told, device="c", state=None, model=None):
    outcome = algorithm.local(model or network(), state or State(), down(), Own(FLEET[device], told), told)
    assert isinstance(outcome, tuple)
    return outcome


def vector(tree):
    return torch.cat([leaf.flatten() for leaf in tree.values() if leaf.ndim > 1])


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.lists(st.integers(0, 6), min_size=1, max_size=700),
    thousandths=st.integers(0, 1000),
    stretch=st.sampled_from([lambda x: x, lambda x: 3 * x + 1, lambda x: x**3, torch.exp]),
)
def test_exactly_so_many_of_the_most_important_are_held(ranks, thousandths, stretch):
    """N - floor(rho N); of equal ones the first; the same under monotone transforms; against a stable sort."""
    importance = torch.tensor(ranks, dtype=torch.float32)
    number = sparse_update.count_held(len(ranks), thousandths / 1000)
    assert number == len(ranks) - thousandths * len(ranks) // 1000
    mask = sparse_update.most_important(stretch(importance), number)
    first = sorted(range(len(ranks)), key=lambda place: (-ranks[place], place))[:number]
    assert mask.nonzero().flatten().tolist() == sorted(first)


def ranked(importance, rate=HYPER.learning_rate, model=None):
    """What a step of plain autograd on the received shared part says, with a device's own part as it begins."""
    told = told_of()
    layers = build_initial(CNN, SEED).layers
    inputs, labels = next(iter(Own(FLEET["c"], told)))
    functional.cross_entropy(layers(inputs), labels).backward()
    gradient = torch.cat([layers[place].weight.grad.flatten() for place in (7, 9)])
    weights = vector(down())
    return {"difference": gradient.abs(), "taylor": (gradient * weights).abs(), "magnitude": weights.abs()}[importance]


@pytest.mark.parametrize("importance", ["difference", "taylor", "magnitude"])
def test_ranks_as_it_says(importance):
    """One warm-up step: |u^ - u| is the gradient's magnitude, taylor that times the weight."""
    algorithm = pruned_personalization(personal_steps=0, importance=importance)
    _, result = do(algorithm, told_of(prune=0.5))
    mask = sparse_update.unpack_sparse(result.tree, COUNT)[1]
    ranks = ranked(importance)
    assert mask.sum() == COUNT - COUNT // 2
    assert ranks[mask].min() >= ranks[~mask].max() - 1e-6


def test_a_share_of_zero_is_the_identity_and_of_one_sends_nothing():
    """At 1 a device still personalizes."""
    algorithm = pruned_personalization()
    _, whole = do(algorithm, told_of(prune=0.0))
    assert set(whole.tree) == {"values", "7.bias", "9.bias"}
    assert len(whole.tree["values"]) == COUNT
    state, none = do(algorithm, told_of(prune=1.0))
    assert none.tree == {}
    assert none.metrics == {"pruned": 1.0}
    assert not torch.equal(state.tree["personal/0.weight"], build_initial(CNN, SEED).tree()["0.weight"])
    together, nothing = do(pruned_personalization(updating="simultaneous"), told_of(prune=1.0))
    assert nothing.tree == {}
    torch.testing.assert_close(together.tree, state.tree)


@pytest.mark.parametrize("updating", ["alternating", "simultaneous"])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9}, {"weight_decay": 0.1, "momentum": 0.5}])
def test_what_is_pruned_is_zero_at_every_step(updating, extra):
    """Exactly, whatever the step adds; watched while the layers compute, and of what they end with."""
    model, seen = network(), []
    model.layers[7].register_forward_hook(lambda layer, _inputs, _outputs: seen.append(layer.weight.detach().clone()))
    hyper = msgspec.structs.replace(HYPER, **extra)
    algorithm = pruned_personalization(updating=updating, global_steps=4, personal_steps=4)
    _, result = do(algorithm, told_of(hyper, prune=0.6), model=model)
    mask = sparse_update.unpack_sparse(result.tree, COUNT)[1]
    first = mask[:288].view(9, 32)
    during = seen[-4:]
    assert all(not weights[~first].any() for weights in during)
    assert during[-1][first].count_nonzero() == first.sum()
    assert not vector({key: leaf for key, leaf in model.tree().items() if key[0] in "79"})[~mask].any()


def test_each_phase_leaves_the_other_part_alone():
    """u while v moves, v while u moves: to the bit."""
    model, begun = network(), build_initial(CNN, SEED).tree()
    state, result = do(pruned_personalization(global_steps=1, prune=1.0), told_of(prune=1.0), model=model)
    assert all(torch.equal(model.tree()[key], begun[key]) for key in ("7.weight", "7.bias", "9.weight", "9.bias"))
    assert not torch.equal(model.tree()["0.weight"], begun["0.weight"])
    state, result = do(pruned_personalization(personal_steps=0), told_of(prune=0.5), model=model)
    assert all(torch.equal(leaf, begun[key.removeprefix("personal/")]) for key, leaf in state.tree.items())
    assert not torch.equal(result.tree["7.bias"], begun["7.bias"])


@pytest.mark.parametrize("updating", ["alternating", "simultaneous"])
def test_warm_up_leaves_no_trace_but_the_mask(updating):
    """What is held would have come out the same after a warm-up of other steps that gave the same mask."""
    one = do(pruned_personalization(updating=updating, warmup_steps=1, importance="magnitude"), told_of(prune=0.4))
    more = do(pruned_personalization(updating=updating, warmup_steps=0, importance="magnitude"), told_of(prune=0.4))
    assert all(torch.equal(leaf, more[1].tree[key]) for key, leaf in one[1].tree.items())
    for steps in (1, 3):
        algorithm = pruned_personalization(updating=updating, warmup_steps=steps)
        state, result = do(algorithm, told_of(prune=1e-9))
        plain_state, plain = do(fedalt(updating=updating), told_of(prune=0.0))
        assert all(torch.equal(leaf, plain.tree[key]) for key, leaf in result.tree.items())
        assert all(torch.equal(leaf, plain_state.tree[key]) for key, leaf in state.tree.items())


def test_warm_up_with_layers_that_draw_and_normalise_leaves_no_trace():
    """Of two devices that hold all but one weight, one that warmed up for longer drew and counted the same."""
    spec = Spec(name="alexnet", options={"width": 0.03, "hidden": 8, "classes": 3, "dropout": 0.5})
    data = pictures(8, 1, (3, 32, 32))
    begun = build_initial(spec, SEED)
    linear = {name for name, layer in begun.layers.named_children() if type(layer).__name__ == "Linear"}
    ours = {key: leaf.clone() for key, leaf in begun.tree().items() if key.partition(".")[0] in linear}
    count = sum(leaf.numel() for leaf in ours.values() if leaf.ndim > 1)
    found = []
    for steps in (1, 2):
        told = told_of(prune=1.5 / count, weights=count)
        algorithm = pruned_personalization(warmup_steps=steps, personal_steps=1, global_steps=2)
        torch.manual_seed(1)
        found.append(algorithm.local(build_initial(spec, 1), State(), copied(ours), Own(data, told), told)[0])
    assert all(torch.equal(leaf, found[1].tree[key]) for key, leaf in found[0].tree.items())


def test_the_network_may_have_held_anything_before():
    """A bench hands the same network to every task: no bit of what it held counts, in or out of gradients."""
    model = network(seed=77)
    functional.cross_entropy(model.layers(FLEET["a"].inputs), FLEET["a"].labels).backward()
    first = do(pruned_personalization(), told_of(prune=0.5), model=model)
    again = do(pruned_personalization(), told_of(prune=0.5), model=model)
    fresh = do(pruned_personalization(), told_of(prune=0.5))
    for state, result in (again, fresh):
        assert all(torch.equal(leaf, result.tree[key]) for key, leaf in first[1].tree.items())
        assert all(torch.equal(leaf, state.tree[key]) for key, leaf in first[0].tree.items())
    assert not any(
        leaf.data_ptr() == own.data_ptr() for leaf in first[0].tree.values() for own in model.tree().values()
    )


def test_a_device_goes_on_with_the_part_it_kept():
    """Round by round; what it kept of another model, or no seed to begin from, is a failure with its cause."""
    algorithm = pruned_personalization(prune=1.0)
    told = told_of(prune=1.0)
    once = do(algorithm, told)[0]
    twice = do(algorithm, told, state=once)[0]
    assert not torch.equal(once.tree["personal/0.weight"], twice.tree["personal/0.weight"])
    other = State({"personal/0.weight": torch.zeros(7)})
    with pytest.raises(TaskFailed, match="model"):
        do(algorithm, told, state=other)
    with pytest.raises(TaskFailed, match="seed"):
        do(algorithm, msgspec.structs.replace(told, values={"prune": 1.0}))
    with pytest.raises(TaskFailed, match="seed"):
        do(algorithm, told, model=Model(network().layers))


def test_a_device_refuses_what_is_no_shared_part():
    algorithm, told = pruned_personalization(), told_of(prune=0.5)
    own = Own(FLEET["a"], told)
    with pytest.raises(WireError) as caught:
        algorithm.local(network(), State(), down(layers="7"), own, told)
    assert caught.value.reason == "params"
    with pytest.raises(WireError, match=r"7\.bias"):
        algorithm.local(network(), State(), down() | {"7.bias": torch.zeros(3)}, own, told)
    with pytest.raises(TaskFailed, match="examples"):
        algorithm.local(network(), State(), down(), Own(pictures(0, 1), told), told)
    hot = msgspec.structs.replace(HYPER, learning_rate=1e38, momentum=0.9)
    with pytest.raises(TaskFailed, match="diverged"):
        do(pruned_personalization(personal_steps=0, warmup_steps=4), told_of(hot, prune=0.5))
    with pytest.raises(TaskFailed, match="diverged"):  # of what never travels nobody else would notice
        do(pruned_personalization(personal_steps=4), told_of(hot, prune=1.0))


def test_what_is_timed_is_a_plain_step_on_every_batch():
    """As many as there are, of the whole network, whatever the method's own steps are."""
    algorithm, told = pruned_personalization(personal_steps=1, global_steps=1), told_of(prune=0.9)
    passes = []
    model = network()
    model.layers.register_forward_hook(lambda *_: passes.append(1))
    algorithm.resources.timed_step(model, State(), down(), Own(FLEET["c"], told), told)
    assert len(passes) == 10 * 4


def test_states_of_two_seeds_differ_and_of_one_agree():
    """The bytes of a device's first own part are a function of the run's seed alone."""
    told = [told_of(prune=1.0, model_seed=seed) for seed in (1, 2, 1)]
    first, other, again = (
        do(pruned_personalization(personal_steps=0), one)[0].tree["personal/0.weight"] for one in told
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert play(pruned_personalization()).devices.keys() == FLEET.keys()
    assert build_blank(CNN).spec == CNN
