"""SemiFL's device half against plain loops: labels once a round, what is kept, what is mixed, what is skipped."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from shared.algorithms.semisupervised.full_model.semifl import semifl
from shared.algorithms.semisupervised.full_model.semifl_device import (
    MixedBatch,
    label_examples,
    make_mixed_batch,
    mix_inputs,
)
from shared.algorithms.semisupervised.full_model.semifl_settings import SemiflSettings
from shared.codecs import CODECS
from shared.data.examples import Examples
from shared.data.views.pair import make_views
from shared.errors import Diverged, TaskFailed
from shared.protocol.messages import Assignment, Hyper, Spec, derive_seed
from shared.registry import build
from shared.tensors.tree import State
from tests.shared.algorithms.sessions import Own, make

HYPER = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
TOLD = Assignment(seed=17, hyper=HYPER)
SEEDS = st.integers(0, 2**40)
SHARES = st.floats(0, 1)


def pictures(count: int, seed: int = 3, shape=(1, 6, 6)) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return Examples((torch.rand(count, *shape, generator=generator) + labels.view(-1, 1, 1, 1) / 3) / 2, labels)


def device(count: int = 11, told: Assignment = TOLD) -> Own:
    return Own(pictures(count).without_labels(), told)


def run(batches: Own | None = None, name: str = "normed", **options):
    """Return what a device's round came to, with the model that it began with."""
    algorithm = semifl(**{"threshold": 0.36, "mirrors": False, "epochs": 2} | options)
    model = make(name)[0]
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    state, result = algorithm.local(model, State(), start, batches or device(), TOLD)
    assert state == State(), "a device keeps nothing"
    return start, result


def outputs_of(start, inputs):
    """Return what a model in evaluation mode answers to all examples at once."""
    layers = make("normed")[0].layers.eval()
    layers.load_state_dict(start)
    with torch.no_grad():
        return layers(inputs)


@given(seed=SEEDS, share=SHARES)
def test_a_mixed_example_lies_between_the_two_that_it_is_made_of(seed, share):
    one, other = torch.rand(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(seed % 2**32))
    mixed = mix_inputs(one, other, share)
    assert bool((mixed <= torch.maximum(one, other) + 1e-6).all())
    assert bool((mixed >= torch.minimum(one, other) - 1e-6).all())
    assert torch.equal(mix_inputs(one, other, 1.0), one)
    assert torch.equal(mix_inputs(one, other, 0.0), other)


@given(seed=SEEDS, share=SHARES)
def test_the_loss_is_that_of_labels_mixed_as_the_examples_are(seed, share):
    """lambda CE(y) + (1 - lambda) CE(y') is the cross-entropy with a distribution over both."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    strong, mixed = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    labels, others = torch.randint(4, (2, 5), generator=generator)
    found = MixedBatch(strong, mixed, labels, others, share).objective(lambda rows: 2 * rows)
    soft = share * functional.one_hot(labels, 4) + (1 - share) * functional.one_hot(others, 4)
    wanted = functional.cross_entropy(2 * strong, labels) - (soft * (2 * mixed).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(found.loss, wanted)
    fixed = functional.cross_entropy(2 * strong, labels).item()
    assert (found.terms["fix_loss"], found.examples) == (fixed, 5)
    assert sum(found.terms.values()) == pytest.approx(wanted.item())


@given(seed=SEEDS, mixing=st.floats(0.1, 5))
def test_views_and_share_are_a_function_of_the_seed(seed, mixing):
    inputs, labels = pictures(8).inputs, torch.arange(4)
    settings = SemiflSettings(mixing=mixing)
    one, again, other = (
        make_mixed_batch(settings, (inputs[:4], inputs[4:]), (labels, labels), number)
        for number in (seed, seed, seed + 1)
    )
    assert one.share == again.share
    assert one.share != other.share
    assert 0 <= one.share <= 1
    assert torch.equal(one.mixed, again.mixed)
    assert torch.equal(one.strong, again.strong)


def test_all_examples_are_labelled_in_evaluation_mode_and_the_threshold_is_kept_too():
    """By batches or at once is the same, for BatchNorm goes by the statistics that came; these stay as they are."""
    model, batches = make("normed")[0], device()
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    likeliest, labels = outputs_of(start, batches.data.inputs).softmax(1).max(1)
    threshold = likeliest.sort().values[4].item()
    for size in (1, 3, 100):
        found = label_examples(model.layers, batches, size, threshold - 1e-6)
        assert torch.equal(found.labels, labels)
        assert torch.equal(found.kept, (likeliest >= threshold - 1e-6).nonzero().flatten())
    assert len(found.kept) == len(labels) - 4
    whole = label_examples(model.layers, batches, 100, threshold)
    assert len(whole.kept) == len(labels) - 4, "as likely as the threshold is kept"
    assert all(torch.equal(leaf, start[key]) for key, leaf in model.tree().items())


def plain_round(start, data: Examples, threshold: float):
    """Return the weights of a device's round, by torch's own optimizer, and the mean loss; `normed` has a Dropout."""
    layers = make("normed")[0].layers
    layers.load_state_dict(start)
    likeliest, labels = outputs_of(start, data.inputs).softmax(1).max(1)
    kept = (likeliest >= threshold).nonzero().flatten()
    layers.train()
    weights = list(layers.parameters())
    optimizer = torch.optim.SGD(weights, 0.1, 0.9, weight_decay=0.01, nesterov=True)
    generator, step, losses = torch.Generator().manual_seed(derive_seed(17, 0, "orders")), 0, []
    for _ in range(2):
        order = torch.randperm(len(kept), generator=generator)
        for own in [kept[part] for part in order.tensor_split(math.ceil(len(kept) / 4))]:
            step += 1
            drawn = torch.randint(len(data), (len(own),), generator=generator)
            seed = derive_seed(17, step, "mixed")
            share = random.Random(seed).betavariate(0.75, 0.75)
            weak, strong = make_views(
                data.inputs[own], ("weak", "strong"), derive_seed(seed, 0, "views"), mirrors=False
            )
            other = make_views(data.inputs[drawn], ("weak",), derive_seed(seed, 1, "views"), mirrors=False)[0]
            loss = functional.cross_entropy(layers(strong), labels[own])
            mixed = layers(share * weak + (1 - share) * other)
            loss = loss + share * functional.cross_entropy(mixed, labels[own])
            loss = loss + (1 - share) * functional.cross_entropy(mixed, labels[drawn])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            losses += len(own) * [loss.item()]
    return {key: leaf.detach() for key, leaf in layers.named_parameters()}, sum(losses) / len(losses)


def test_a_round_is_a_plain_loops_and_only_weights_travel():
    batches = device(23)
    likeliest = outputs_of(make("normed")[0].tree(), batches.data.inputs).softmax(1).amax(1).sort().values
    threshold = (likeliest[8] + likeliest[9]).item() / 2
    torch.manual_seed(4)
    start, result = run(batches, threshold=threshold)
    torch.manual_seed(4)
    weights, loss = plain_round(start, batches.data, threshold)
    assert result.tree.keys() == weights.keys()
    assert not any("running" in name or "tracked" in name for name in result.tree)
    for name, leaf in weights.items():
        torch.testing.assert_close(start[name] + result.tree[name], leaf, rtol=1e-4, atol=1e-6)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert (result.weight, result.num_examples) == (1.0, 23)
    assert result.metrics["fix_loss"] + result.metrics["mix_loss"] == pytest.approx(loss, rel=1e-5)
    assert result.metrics.keys() == {"kept_examples", "skipped", "fix_loss", "mix_loss"}
    assert (result.metrics["kept_examples"], result.metrics["skipped"]) == (14.0, 0.0)


def test_no_label_of_a_device_changes_anything():
    torch.manual_seed(4)
    unlabelled = run(device())[1]
    torch.manual_seed(4)
    labelled = run(Own(pictures(11), TOLD))[1]
    assert all(torch.equal(leaf, labelled.tree[name]) for name, leaf in unlabelled.tree.items())


def test_a_device_that_is_sure_of_nothing_sends_nothing_and_says_so():
    """It trained on no example, and has no loss; any codec carries an update of nothing."""
    _, result = run(threshold=0.999999)
    assert (result.tree, result.num_examples, result.loss) == ({}, 0, None)
    assert result.metrics == {"kept_examples": 0.0, "skipped": 1.0}
    for name in CODECS:
        codec = build(CODECS, Spec(name=name), "codec")
        payload, _ = codec.encode(result.tree, None)
        assert codec.decode(payload).tree == {}


def test_a_single_kept_example_can_be_trained_on_though_batchnorm_follows():
    batches = device()
    likeliest = outputs_of(make("normed")[0].tree(), batches.data.inputs).softmax(1).amax(1).sort().values
    _, result = run(batches, threshold=(likeliest[-1] + likeliest[-2]).item() / 2)
    assert result.metrics["kept_examples"] == 1.0
    assert result.loss is not None


def test_frozen_weights_do_not_travel():
    algorithm, model = semifl(threshold=0.01), make("normed")[0]
    model.layers[0].weight.requires_grad_(False)
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    _, result = algorithm.local(model, State(), start, device(), TOLD)
    assert "0.weight" not in result.tree
    assert "0.bias" in result.tree


def test_a_model_that_answers_no_numbers_is_an_error_and_no_skipped_round():
    algorithm, model = semifl(), make("normed")[0]
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    start["8.bias"].fill_(100)
    start["10.weight"].fill_(3e38)
    with pytest.raises(Diverged):
        algorithm.local(model, State(), start, device(), TOLD)


def test_a_device_without_examples_fails():
    with pytest.raises(TaskFailed, match="examples"):
        run(device(0))


def test_a_timed_step_is_taken_on_every_batch_and_costs_what_the_method_says():
    """Steps are timed as if all were kept: two batches a step; a third of an epoch more goes to labels."""
    algorithm, model = semifl(epochs=5, threshold=0.99), make("normed")[0]
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    _, result = algorithm.resources.timed_step(model, State(), start, device(), TOLD)
    assert any(bool(leaf.any()) for leaf in result.tree.values())
    assert algorithm.resources.step_share(model, TOLD) == pytest.approx(2 + 1 / 15)
