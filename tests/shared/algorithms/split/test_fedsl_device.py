"""FedSL device half: payloads, mask by step, state between rounds."""

from __future__ import annotations

import math
import weakref
from functools import partial

import msgspec
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.split.client_part import Bottom
from shared.algorithms.split.fedsl import fedsl, splitfed
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.protocol.messages import Missed
from shared.tensors import bits, file
from shared.tensors.counts import floor_share
from shared.tensors.pruning import max_prunable, sparsity
from shared.tensors.tree import State
from tests.naming import naming
from tests.shared.algorithms.sessions import HYPER, Fleet, Own, drive, short

PRUNING = partial(splitfed, sparsity=0.7, schedule="constant")


def begun(fleet: Fleet, state: State | None = None, **told):
    """Return a session of the fleet's first device, and what it is told."""
    one = msgspec.structs.replace(fleet.told(1)["a"], **told)
    start = {key: leaf.clone() for key, leaf in fleet.algorithm.broadcast(fleet.state, "a", one).items()}
    return fleet.algorithm.local(fleet.skeleton, state or State(), start, Own(fleet.data["a"], one), one)


def ended(session, down) -> tuple:
    with pytest.raises(StopIteration) as done:
        session.send(down)
    return done.value.value


def answer(up, generator) -> dict:
    """Return some gradient and a loss, as a server would send."""
    return {"gradient": torch.randn(up["features"].shape, generator=generator), "loss": torch.tensor(0.5)}


def weights_of(tree, name="cnn") -> torch.Tensor:
    """Return the weights that can be pruned, as one vector."""
    return torch.cat([leaf.flatten() for key, leaf in tree.items() if key in {"0.weight", "3.weight", "1.weight"}])


def test_a_session_lets_go_of_what_came_down():
    """It is a copy of the whole part below the cut, pages of a file that need not stay in memory."""
    fleet = Fleet(fedsl(), "mlp", (7,))
    one = fleet.told(1)["a"]
    start = {key: leaf.clone() for key, leaf in fleet.algorithm.broadcast(fleet.state, "a", one).items()}
    held = [weakref.ref(leaf) for leaf in start.values()]
    session = fleet.algorithm.local(fleet.skeleton, State(), start, Own(fleet.data["a"], one), one)
    del start
    next(session)
    assert held
    assert all(leaf() is None for leaf in held)


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 0.7])
@pytest.mark.parametrize(("name", "size"), [("mlp", 5), ("cnn", 8)])
def test_bytes_are_the_papers_formulas(p, name, size):
    """Up 4 B D' + ceil(D / 8) + B, down 4 B D' and a loss of 4; where all travels, there is no bitmap."""
    fleet = Fleet(fedsl(drop=p), name, (7,))
    driven = fleet.play()
    for ups, downs in zip(driven.ups, driven.downs, strict=True):
        up, down, batch = ups["a"], downs["a"], len(ups["a"]["labels"])
        kept = int(bits.unpack(up["keep"].numpy(), size, 1).sum()) if p else size
        sent = sum(up[key].nbytes for key in ("features", "keep", "labels") if key in up)
        assert sent == 4 * batch * kept + (math.ceil(size / 8) if p else 0) + batch
        assert sum(leaf.nbytes for leaf in down.values()) == 4 * batch * kept + 4
        assert ("shape" in up) == bool(p)


def test_more_dropout_is_fewer_bytes():
    """On average over twenty steps; a channel is a channel's columns, elements save nothing."""

    def sent(**options):
        driven = Fleet(fedsl(period=20, **options), "cnn", (8,), rounds=1).play()
        return sum(leaf.nbytes for ups in driven.ups for leaf in ups["a"].values())

    everything = sent(drop=0.0)
    assert everything > sent(drop=0.3) > sent(drop=0.7)
    assert everything > sent(drop=0.7, granularity="channel")
    assert sent(drop=0.7, granularity="element") == everything


def test_the_share_that_travels_is_one_minus_p():
    """E D' = (1 - p) D: of 8 columns over 200 steps, within 5 standard deviations."""
    fleet = Fleet(fedsl(period=200, drop=0.7), "cnn", (8,), rounds=1)
    kept = [int(bits.unpack(ups["a"]["keep"].numpy(), 8, 1).sum()) for ups in fleet.play().ups]
    assert abs(sum(kept) - 0.3 * 8 * 200) < 5 * math.sqrt(0.3 * 0.7 * 8 * 200)


def test_labels_take_a_byte_where_none_is_beyond_it():
    for largest, dtype in ((255, torch.uint8), (256, torch.int64)):
        fleet = Fleet(splitfed(), "mlp", (4,))
        fleet.data["a"].labels[2] = largest
        up = next(begun(fleet))
        assert up["labels"].dtype == dtype
        assert largest in up["labels"]


@pytest.mark.parametrize("granularity", ["column", "channel", "element"])
def test_a_step_with_dropout_is_autograds(granularity):
    """The whole network with A delta / (1 - p) between its halves: both halves' steps, from what travels alone."""
    fleet = Fleet(splitfed(drop=0.5, granularity=granularity, schedule="constant"), "cnn", (4,))
    start = {key: leaf.clone().requires_grad_() for key, leaf in fleet.state.tree.items()}
    up = fleet.play().ups[0]["a"]
    inputs, labels = next(iter(fleet.own(fleet.told(1))["a"]))
    features = functional_call(
        fleet.skeleton.below(1), fleet.algorithm.broadcast(State(start, fleet.state.facts), "a", None), (inputs,)
    )
    if granularity == "element":
        scale = torch.where(features != 0, up["features"] / features, 0.0).detach().round()
    else:
        keep = torch.from_numpy(bits.unpack(up["keep"].numpy(), 8 if granularity == "column" else 2, 1)).float() * 2
        scale = keep.view((1, 2, 2, 2) if granularity == "column" else (1, 2, 1, 1)).expand_as(features)
    assert set(scale.unique().tolist()) <= {0.0, 2.0}
    below = set(fleet.skeleton.below(1).state_dict())
    above = {key: leaf for key, leaf in start.items() if key not in below}
    outputs = functional_call(fleet.skeleton.above(1), above, (features * scale,))
    functional.cross_entropy(outputs, labels).backward()
    for key, leaf in start.items():
        expected = leaf.detach() - HYPER.learning_rate * leaf.grad
        torch.testing.assert_close(fleet.state.tree[key], expected, rtol=1e-5, atol=1e-6)


# --- the mask ---------------------------------------------------------------------------------------------------------


def test_zeros_are_as_many_as_the_schedule_says_and_nested():
    """Round by round of six steps, sessions cut short after each: floor(rho_t n) zeros, none of which comes back before
    the average; biases stay."""
    fleet = Fleet(PRUNING(cut=2, period=6), "cnn", (8,), rounds=2)
    layers = [(2, 9), (4, 18)]
    count, before = 18 + 72, None
    told = fleet.told(1)
    for steps in range(1, 7):
        shorter = short(told, steps)
        driven = drive(fleet.algorithm, fleet.skeleton, fleet.state, shorter, fleet.own(shorter))
        result = driven.results["a"]
        active = weights_of(result.tree) != 0
        wanted = min(math.floor(sparsity(steps, 12, 0.7) * count), max_prunable(layers))
        assert int((~active).sum()) == wanted
        assert result.metrics["sparsity"] == wanted / count
        assert (result.tree["0.bias"] != 0).all()
        assert before is None or not (active & ~before).any()
        before = active
    packed = driven.devices["a"].tree["mask"]
    assert torch.equal(torch.from_numpy(bits.unpack(packed.numpy(), count, 1)).bool(), before)
    assert packed.nbytes == math.ceil(count / 8)


def test_the_most_important_weights_stay():
    """At the first step: those of the greatest |w g|, the gradient of that very batch, dense."""
    fleet = Fleet(PRUNING(period=1), "cnn", (4,), rounds=1)
    start = {key: leaf.clone().requires_grad_() for key, leaf in fleet.state.tree.items()}
    inputs, labels = next(iter(fleet.own(fleet.told(1))["a"]))
    functional.cross_entropy(functional_call(fleet.skeleton.layers, start, (inputs,)), labels).backward()
    weights, gradient = start["0.weight"].detach(), start["0.weight"].grad
    result = fleet.play().results["a"].tree["0.weight"]
    wanted = math.floor(0.7 * 18)
    importance = (weights * gradient).abs().flatten()
    bound = importance.sort().values[wanted - 1]
    assert torch.equal(result.flatten() != 0, importance > bound)
    moved = torch.where(result != 0, weights - HYPER.learning_rate * gradient, 0.0)
    torch.testing.assert_close(result, moved, rtol=1e-5, atol=1e-6)


def test_after_the_average_the_mask_is_looked_at_anew_in_the_same_step():
    """The average is denser than a device; one step later the device is as sparse as the schedule says again, by a
    mask that need not be the last one's, and what left it is zero after that step's update."""
    fleet = Fleet(PRUNING(period=4, cut=2), "cnn", (8, 8, 8), rounds=4)
    before = fleet.play()
    average = weights_of(fleet.state.tree)
    dense = int((average == 0).sum())
    assert dense < int((weights_of(before.results["a"].tree) == 0).sum())
    told = short(fleet.told(2), 1)
    after = drive(fleet.algorithm, fleet.skeleton, fleet.state, told, fleet.own(told), before=fleet.devices)
    changed = 0
    for device in fleet.names:
        active = weights_of(after.results[device].tree) != 0
        assert int((~active).sum()) == math.floor(sparsity(5, 16, 0.7) * 90)
        changed += int((active & (weights_of(before.results[device].tree) == 0)).sum())
    assert changed > 0


def test_the_forward_pass_after_the_average_is_dense():
    """Features of the first step are those of the average as it came; it is pruned after the gradient is here."""
    fleet = Fleet(PRUNING(period=4), "cnn", (8, 8), rounds=2)
    fleet.play()
    told = fleet.told(2)
    inputs, _ = next(iter(fleet.own(told)["a"]))
    expected = functional_call(
        fleet.skeleton.below(1), fleet.algorithm.broadcast(fleet.state, "a", told["a"]), (inputs,)
    )
    driven = drive(fleet.algorithm, fleet.skeleton, fleet.state, told, fleet.own(told), before=fleet.devices)
    assert torch.equal(driven.ups[0]["a"]["features"], expected)


@pytest.mark.parametrize("known", [True, False], ids=["its own mask", "no state"])
def test_where_enough_is_zero_already_the_mask_stays(known):
    """The schedule asks for fewer zeros than the weights have (the run began again): what is zero is not revived, by
    the mask of the device's state; a device that lost it takes the zeros that came."""
    fleet = Fleet(PRUNING(period=3), "cnn", (8,), rounds=100)
    weights = fleet.state.tree["0.weight"]
    weights.view(-1)[:9] = 0
    mask = torch.ones(18, dtype=torch.bool)
    mask[:9], mask[9] = False, not known
    state = State({"mask": torch.from_numpy(bits.pack(mask.numpy(), 1))}) if known else State()
    session = begun(fleet, state, values={"first_step": 3, "total_steps": 300})
    generator = torch.Generator().manual_seed(1)
    up = next(session)
    for _ in range(2):
        up = session.send(answer(up, generator))
    after, result = ended(session, answer(up, generator))
    assert torch.equal(result.tree["0.weight"].flatten() != 0, mask)
    assert torch.equal(torch.from_numpy(bits.unpack(after.tree["mask"].numpy(), 18, 1)).bool(), mask)


def test_one_round_of_the_paper_has_one_mask():
    """With three batches in each of its rounds: zeros change at the first of three, and at the fourth."""
    fleet = Fleet(PRUNING(period=2, steps_per_round=3, cut=2), "cnn", (8,), rounds=1)
    zeros = []
    for steps in range(1, 7):
        told = short(fleet.told(1), steps)
        driven = drive(fleet.algorithm, fleet.skeleton, fleet.state, told, fleet.own(told))
        zeros.append(int((weights_of(driven.results["a"].tree) == 0).sum()))
    first, second = (floor_share(sparsity(step, 2, 0.7), 90) for step in (1, 2))
    assert zeros == [first] * 3 + [second] * 3


def test_every_output_channel_keeps_a_weight():
    """At 0.99 of all weights: as many zeros as leave one to each, and no layer dies."""
    fleet = Fleet(splitfed(sparsity=0.99, cut=2), "cnn", (8,), rounds=1)
    tree = fleet.play().results["a"].tree
    for key in ("0.weight", "3.weight"):
        assert (tree[key].flatten(1) != 0).sum(1).tolist() == [1] * len(tree[key])


def test_only_weights_of_convolutions_and_linear_layers_are_pruned():
    """Neither biases, nor BatchNorm, nor a LayerNorm over two axes, nor what is frozen."""
    network = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.LayerNorm((2, 4)), nn.Flatten(), nn.Linear(8, 3))
    network[4].requires_grad_(False)
    bottom = Bottom(Model(nn.Sequential(*network, nn.Identity()), {1: 5}, (1, 6)), 1, dict(network.state_dict()))
    assert (bottom.count, bottom.layers) == (6, [(2, 3)])
    assert len(bottom.vector) == sum(leaf.numel() for leaf in network.parameters() if leaf.requires_grad)
    features, _ = bottom.forward(torch.randn(3, 1, 6))
    bottom.backward(features, torch.ones_like(features))
    assert bottom.gradient[:6].any()
    assert bottom.tree().keys() == network.state_dict().keys()


def test_the_ratio_of_assumption_five_is_told():
    """|w - w~|^2 / |w|^2 of the first mask; for magnitudes it is at most rho_t."""
    fleet = Fleet(PRUNING(importance="magnitude", period=1), "cnn", (8,), rounds=1)
    before = fleet.state.tree["0.weight"].clone()
    result = fleet.play().results["a"]
    lost = before[result.tree["0.weight"] == 0].square().sum() / before.square().sum()
    assert result.metrics["pruned_norm_ratio"] == pytest.approx(lost.item(), rel=1e-4)
    assert result.metrics["pruned_norm_ratio"] <= 0.7


def test_holders_say_what_they_hold():
    result = Fleet(fedsl(average="holders", sparsity=0.5), "cnn", (8,), rounds=1).play().results["a"]
    assert result.coverage.keys() == {"0.weight"}
    assert torch.equal(result.coverage["0.weight"], result.tree["0.weight"] != 0)


def test_the_state_survives_a_file(tmp_path):
    """A device that restarts between rounds goes on with the same bits."""
    ends = []
    for restarts in (False, True):
        fleet = Fleet(fedsl(sparsity=0.6, period=2), "cnn", (8,), rounds=3)
        for _ in range(3):
            fleet.play()
            if restarts:
                file.save(tmp_path / "state", fleet.devices["a"])
                fleet.devices = {"a": file.load(tmp_path / "state")}
        ends.append(fleet.state.tree)
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


# --- the quantizer ----------------------------------------------------------------------------------------------------


def test_active_numbers_alone_make_the_range():
    """One bit: every active number moves by eta times the least or the greatest active |g|, pruned ones not at all."""
    fleet = Fleet(splitfed(sparsity=0.5, bits=1, schedule="constant"), "cnn", (8,), rounds=1)
    start = {key: leaf.clone() for key, leaf in fleet.algorithm.broadcast(fleet.state, "a", fleet.told(1)["a"]).items()}
    session = begun(fleet)
    up = next(session)
    generator = torch.Generator().manual_seed(1)
    _, result = ended(session, answer(up, generator))
    moved = torch.cat([(result.tree[key] - start[key])[result.tree[key] != 0] for key in ("0.weight", "0.bias")])
    steps = (moved.abs() / HYPER.learning_rate).sort().values
    assert len(steps) == 9 + 2
    nearest = torch.minimum((steps - steps[0]).abs(), (steps - steps[-1]).abs())
    assert (nearest < 1e-5).all()
    assert steps[0] > 1e-5
    assert not result.tree["0.weight"].flatten()[~(result.tree["0.weight"] != 0).flatten()].any()


def test_many_bits_are_hardly_a_change():
    """24 bits differ from none by rounding alone, 2 bits do not."""
    ends = {}
    for bits_ in (2, 24, 32):
        fleet = Fleet(splitfed(bits=bits_), "cnn", (8,), rounds=1)
        fleet.play()
        ends[bits_] = fleet.state.tree["0.weight"]
    torch.testing.assert_close(ends[24], ends[32], rtol=1e-5, atol=1e-6)
    assert (ends[2] - ends[32]).abs().max() > 1e-4


# --- what does not count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["nan", "inf", "no loss"])
def test_a_batch_that_is_refused_leaves_no_trace(bad):
    """Neither in parameters nor in BatchNorm's statistics, nor in the mask; it is counted."""
    fleet = Fleet(fedsl(period=1, drop=0.0), "normed", (8,))
    session = begun(fleet)
    up = next(session)
    down = answer(up, torch.Generator().manual_seed(1))
    if bad == "no loss":
        del down["loss"]
    else:
        down["gradient"].view(-1)[3] = float(bad)
    after, result = ended(session, down)
    start = fleet.algorithm.broadcast(fleet.state, "a", fleet.told(1)["a"])
    assert all(torch.equal(result.tree[key], leaf) for key, leaf in start.items())
    assert (result.loss, result.metrics["refused_batches"], result.metrics["sparsity"]) == (None, 1.0, 0.0)
    assert bits.unpack(after.tree["mask"].numpy(), 36, 1).all()


def test_the_next_batch_counts_again():
    """Two steps, the first of which is refused: as a session whose first step was missed."""
    ends = []
    for first in ("refused", "missed"):
        fleet = Fleet(fedsl(period=2), "normed", (8,))
        session, generator = begun(fleet), torch.Generator().manual_seed(1)
        zeros = {"gradient": torch.zeros_like(next(session)["features"])}
        up = session.send(zeros if first == "refused" else Missed(1))
        ends.append(ended(session, answer(up, generator))[1].tree)
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_missed_steps_skip_their_batches(steps):
    """Missed(n) at step 2 of 6: the next is step 2 + n, on its own batch and with its own draws."""
    fleet = Fleet(fedsl(period=6, drop=0.5), "mlp", (10,))
    ups = [one["a"] for one in fleet.play().ups]
    fleet = Fleet(fedsl(period=6, drop=0.5), "mlp", (10,))
    session, generator = begun(fleet), torch.Generator().manual_seed(1)
    session.send(answer(next(session), generator))
    up = session.send(Missed(steps))
    expected = ups[1 + steps]
    assert torch.equal(up["labels"], expected["labels"])
    assert torch.equal(up["keep"], expected["keep"])
    for _ in range(4 - steps):
        up = session.send(answer(up, generator))
    _, result = ended(session, answer(up, generator))
    assert result.metrics["missed_steps"] == steps


def test_a_session_that_went_on_without_its_end():
    """Missed beyond the last step ends it; nothing was learned, nothing is reported as a loss."""
    fleet = Fleet(fedsl(period=3), "mlp", (8,))
    session = begun(fleet)
    next(session)
    _, result = ended(session, Missed(7))
    start = fleet.algorithm.broadcast(fleet.state, "a", fleet.told(1)["a"])
    assert all(torch.equal(result.tree[key], leaf) for key, leaf in start.items())
    assert (result.loss, result.metrics["missed_steps"], result.num_examples) == (None, 3.0, 8)


def test_nothing_given_is_changed():
    """The parameters may be views of a file, what came down a view of a frame."""
    fleet = Fleet(fedsl(period=1), "normed", (8,))
    told = fleet.told(1)["a"]
    start = fleet.algorithm.broadcast(fleet.state, "a", told)
    before = {key: leaf.clone() for key, leaf in start.items()}
    session = fleet.algorithm.local(fleet.skeleton, State(), start, fleet.own({"a": told})["a"], told)
    down = answer(next(session), torch.Generator().manual_seed(1))
    copy = down["gradient"].clone()
    _, result = ended(session, down)
    assert torch.equal(down["gradient"], copy)
    assert all(torch.equal(start[key], leaf) for key, leaf in before.items())
    assert not all(torch.equal(result.tree[key], leaf) for key, leaf in before.items())


def test_loss_is_the_mean_over_examples():
    """Batches of 4, 4 and 2 with losses 1, 2 and 5: (4 + 8 + 10) / 10."""
    session = begun(Fleet(splitfed(period=3), "mlp", (10,)))
    up = next(session)
    for loss in (1.0, 2.0):
        up = session.send({"gradient": torch.zeros_like(up["features"]), "loss": torch.tensor(loss)})
    _, result = ended(session, {"gradient": torch.zeros_like(up["features"]), "loss": torch.tensor(5.0)})
    assert (result.loss, result.num_examples, result.weight) == (pytest.approx(2.2), 10, 1.0)


def test_weights_of_devices():
    """One each, or by examples."""
    for weighted, weight in ((False, 1.0), (True, 10.0)):
        result = Fleet(fedsl(weighted=weighted), "mlp", (10,)).play().results["a"]
        assert result.weight == weight


def test_no_examples_fail_the_task():
    with pytest.raises(TaskFailed, match="examples"):
        next(begun(Fleet(fedsl(), "mlp", (0,))))


def test_a_client_part_that_has_diverged_fails_the_task():
    fleet = Fleet(fedsl(), "mlp", (8,))
    fleet.state.tree["1.bias"].fill_(math.inf)
    with pytest.raises(TaskFailed, match="diverged"):
        next(begun(fleet))


def test_a_gradient_of_other_features_is_refused():
    session = begun(Fleet(fedsl(), "mlp", (8,)))
    next(session)
    with pytest.raises(WireError, match=naming("gradient", "(1, 77)")) as caught:
        session.send({"gradient": torch.zeros(1, 77), "loss": torch.tensor(1.0)})
    assert caught.value.reason == "shape"


def test_where_nothing_can_be_pruned_the_rest_is_trained():
    """Of a part without weights no sparsity is told: it is absent, not zero."""
    fleet = Fleet(fedsl(period=2), "scaled")
    before = fleet.state.tree["0.weight"].clone()
    for _ in range(2):
        driven = fleet.play()
    assert "sparsity" not in driven.results["a"].metrics
    assert not torch.equal(before, fleet.state.tree["0.weight"])
