"""The client part as it is computed: gradients are autograd's, and activations computed again change no bit."""

from __future__ import annotations

import subprocess  # noqa: TID251 - a fresh interpreter is the point
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shared.algorithms.split.client_part import Bottom
from shared.algorithms.split.fedsl import fedsl
from shared.errors import TaskFailed
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Spec
from shared.tensors.generators import seed_torch
from tests.naming import naming
from tests.shared.algorithms.sessions import Fleet

ROOT = Path(__file__).parents[4]
NETWORKS = {
    "vgg, BatchNorm and pooling": (Spec(name="vgg13", options={"width": 0.05}), 4),
    "resnet, blocks": (Spec(name="resnet20", options={"width": 2}), 13),
    "alexnet, Dropout that draws": (Spec(name="alexnet", options={"width": 0.03, "hidden": 8, "dropout": 0.5}), 7),
    "signals": (Spec(name="cnn1d", options={"width": 3, "hidden": 5}), 3),
}


def parts(name: str) -> tuple[Model, Bottom, Bottom, torch.Tensor]:
    """Return a network, its client part that keeps activations and the one that does not, and a batch."""
    spec, cut = NETWORKS[name]
    whole = build_initial(spec, 3)
    tree = {key: leaf.clone() for key, leaf in whole.below(cut).state_dict().items()}
    inputs = torch.randn(6, *whole.example, generator=torch.Generator().manual_seed(1))
    return whole, Bottom(build_blank(spec), cut, tree), Bottom(build_blank(spec), cut, tree, recompute=True), inputs


@pytest.mark.parametrize("name", NETWORKS)
def test_activations_computed_again_change_no_bit(name: str) -> None:
    """Features, gradient, buffers, and what is drawn from torch's generator afterwards; twice, with moved buffers.

    Nothing moves before the batch is said to count.
    """
    _, keeping, again, inputs = parts(name)
    for turn in range(2):
        came = []
        for bottom in (keeping, again):
            held = {key: leaf.clone() for key, leaf in bottom.tree().items()}
            with seed_torch(turn):
                features, buffers = bottom.forward(inputs + turn)
                drawn = [torch.rand(3)]
                bottom.backward(features, torch.linspace(-1, 1, features.numel()).view(features.shape))
                drawn.append(torch.rand(3))
            assert all(torch.equal(leaf, held[key]) for key, leaf in bottom.tree().items())
            bottom.keep(buffers)
            came.append([features.detach(), bottom.gradient, *bottom.tree().values(), *drawn])
        assert all(torch.equal(one, other) for one, other in zip(*came, strict=True))
        assert came[0][1].count_nonzero() > 0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_autograds(name: str, again: bool) -> None:  # noqa: FBT001 - a parameter
    """Of the layers as they are, to the bit; a batch after another does not add to it."""
    whole, *both, inputs = parts(name)
    bottom = both[again]
    layers = whole.below(NETWORKS[name][1]).train()
    with seed_torch(7):
        outputs = layers(inputs)
    upstream = torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)
    outputs.backward(upstream)
    for _ in range(2):
        with seed_torch(7):
            bottom.backward(bottom.forward(inputs)[0], upstream)
    expected = torch.cat([leaf.grad.flatten() for leaf in layers.parameters()])
    assert bottom.gradient.shape == expected.shape
    for key, leaf in layers.named_parameters():
        assert torch.equal(bottom.leaves[key].grad, leaf.grad), key


def test_between_the_passes_only_what_layers_that_multiply_are_given_is_kept() -> None:
    """VGG at its second cut: the pictures, and what three more convolutions are given; features have no graph."""
    _, keeping, again, inputs = parts("vgg, BatchNorm and pooling")
    features, _ = again.forward(inputs)
    assert features.grad_fn is None
    assert keeping.forward(inputs)[0].grad_fn is not None
    assert [tuple(inputs.shape[1:]) for inputs, _ in again.piece_inputs] == [
        (3, 32, 32),
        (3, 32, 32),
        (3, 16, 16),
        (6, 16, 16),
    ]


def test_a_batch_without_an_answer_leaves_no_trace() -> None:
    """Its activations are let go when the next one comes, whose gradient is as if it were alone."""
    _, once, again, inputs = parts("signals")
    again.forward(inputs * 2)
    features, _ = again.forward(inputs)
    assert len(again.piece_inputs) == 3
    again.backward(features, torch.ones_like(features))
    features, _ = once.forward(inputs)
    once.backward(features, torch.ones_like(features))
    assert torch.equal(once.gradient, again.gradient)


def test_a_layer_that_changes_in_place_what_is_to_be_used_again_is_refused() -> None:
    """By its name; behind another layer of the same piece, or where activations are kept, it may."""
    late = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Linear(3, 2))
    early = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for layers, fails in ((late, False), (early, True)):
        model, tree = Model(layers, {1: 3}), dict(layers[:3].state_dict())
        Bottom(model, 1, tree).forward(torch.randn(4, 3))
        bottom = Bottom(model, 1, tree, recompute=True)
        if fails:
            with pytest.raises(TaskFailed, match=naming("layer 0", "recompute")):
                bottom.forward(torch.randn(4, 3))
        else:
            bottom.forward(torch.randn(4, 3))


@pytest.mark.parametrize("name", ["normed", "cnn", "mlp"])
def test_sessions_are_the_same_to_the_bit(name: str) -> None:
    """Pruned, quantized, with features dropped, over two rounds of two devices: what goes up, and what is learned."""
    ends = []
    for recompute in (False, True):
        fleet = Fleet(fedsl(period=4, recompute=recompute), name, (8, 8), rounds=2)
        sent = [leaf for _ in range(2) for ups in fleet.play().ups for up in ups.values() for leaf in up.values()]
        ends.append([*fleet.state.tree.values(), *sent])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


PROGRAM = """
import sys
from shared.runtime.processes import loading
with loading():
    import torch
from shared.algorithms.split.client_part import Bottom
from shared.protocol.messages import Spec
from shared.models import MODELS
from shared.models.build import build_blank

models = {name: build_blank(Spec(name=name)) for name in MODELS}
model = models["lenet"]
tree = {key: torch.ones(leaf.shape) for key, leaf in model.below(2).state_dict().items()}
for recompute in (False, True):
    bottom = Bottom(model, 2, tree, recompute=recompute)
    features, _ = bottom.forward(torch.ones(2, *model.example))
    bottom.backward(features, features.detach())
print(*(name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules), "done")
"""


def test_no_client_part_needs_a_compiler_or_an_algebra() -> None:
    """They would be 75 MB of a trainer's memory and 1.3 s of its CPU time; a fresh interpreter is asked."""
    command = [sys.executable, "-c", PROGRAM]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - our own
    assert child.stdout.split() == ["done"]
