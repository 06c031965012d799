"""Accuracy and loss of parameters that are handed in, without a second copy of a network."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.evaluate import score, skeleton
from shared.messages import Spec
from shared.models.init import initial

SPEC = Spec(name="mlp", options={"features": 4, "hidden": 3, "classes": 3})


@pytest.fixture
def examples():
    generator = torch.Generator().manual_seed(1)
    return Examples(torch.randn(23, 4, generator=generator), torch.randint(3, (23,), generator=generator))


def test_a_skeleton_has_shapes_and_no_storage():
    """Of the largest model, too: its parameters are nowhere in memory. An unknown model is the operator's mistake."""
    network = skeleton(Spec(name="mlp", options={"features": 1 << 20, "hidden": 1 << 20}))
    assert all(weight.is_meta for weight in network.parameters())
    assert not network.training
    with pytest.raises(ConfigError, match="unknown model 'mpl'; known: cnn, mlp"):
        skeleton(Spec(name="mpl"))


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_score_is_the_plain_computation(examples, batch_size):
    """Whatever the batches are: mean over the examples, not over the batches."""
    model = initial(SPEC, 3)
    logits = model.layers(examples.inputs)
    found = score(skeleton(SPEC), model.tree(), examples, batch_size)
    assert found.accuracy == (logits.argmax(1) == examples.labels).sum().item() / 23
    assert found.loss == pytest.approx(functional.cross_entropy(logits, examples.labels).item(), rel=1e-5)


def test_score_by_hand():
    """Zero parameters give every class log 3; argmax then says class 0, which two of the four examples are."""
    tree = {key: torch.zeros_like(leaf) for key, leaf in initial(SPEC, 3).tree().items()}
    found = score(skeleton(SPEC), tree, Examples(torch.ones(4, 4), torch.tensor([0, 1, 2, 0])))
    assert (found.accuracy, found.loss) == (0.5, pytest.approx(1.0986123))


def test_scoring_changes_nothing_and_keeps_no_graph(examples):
    """The tree may be views of a file; nothing in it asks for a gradient afterwards."""
    tree = initial(SPEC, 3).tree()
    before = {key: leaf.clone() for key, leaf in tree.items()}
    score(skeleton(SPEC), tree, examples)
    assert all(torch.equal(tree[key], before[key]) for key in before)
    assert all(leaf.grad is None for leaf in tree.values())
