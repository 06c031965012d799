"""A cohort trained at once learns what its devices learn alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from device_agent.trainer.workspace import TaskBatches
from edge_server.replay.stacked_networks import stack_networks
from edge_server.replay.stacked_training import MOST, correction_of, devices_per_pass, divide_cohort, train
from edge_server.rounds.check_plan import load
from shared import registry
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm
from shared.algorithms.fedavg import LocalSgd, fedavg, local_sgd
from shared.data.examples import Examples
from shared.models.base import Model
from shared.models.cnn import cnn
from shared.models.mlp import mlp
from shared.objectives.training import TrainingObjective, build_training_objective
from shared.protocol.messages import Assignment, Hyper, StepOptions
from shared.protocol.objective import ObjectiveSpec
from shared.tensors.generators import seed_torch
from shared.tensors.tree import State
from tests.edge_server.harness import write_plan

STACKED = sorted(name for name in ALGORITHMS if correction_of(ALGORITHMS[name]())[0])
CLASSES = 5
HYPER = Hyper(local_epochs=1, batch_size=4, learning_rate=0.1)
FLOAT32, FLOAT64 = 1e-5, 1e-10
"""Of the largest weight: sums are taken in another order, and every step works on what the last one left."""


@dataclass(frozen=True)
class As:
    """A task's batches with inputs of another precision."""

    batches: TaskBatches
    dtype: torch.dtype

    @property
    def num_examples(self) -> int:
        return self.batches.num_examples

    @property
    def validation(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batches.validation

    def __iter__(self):
        for inputs, labels in self.batches:
            yield inputs.to(self.dtype), labels


def made_up(shape: tuple[int, ...], count: int, seed: int) -> Examples:
    """Return examples that a network can tell apart, so that gradients are neither zero nor noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, *shape, generator=generator)
    return Examples(inputs + labels.view(-1, *[1] * len(shape)) / CLASSES, labels)


def cohort(shape: tuple[int, ...], counts: list[int], hyper: Hyper, seed: int = 0, dtype=torch.float32) -> list[As]:
    """Return the batches of devices with so many examples, each in the order of a seed of its own."""
    assignments = [Assignment(seed=seed + index, hyper=hyper) for index in range(len(counts))]
    return [
        As(TaskBatches(made_up(shape, count, seed + index), assignment, lambda: False), dtype)
        for index, (count, assignment) in enumerate(zip(counts, assignments, strict=True))
    ]


def network(layers: nn.Sequential, dtype: torch.dtype = torch.float32) -> Model:
    return Model(layers.to(dtype))


def require_same(model: Model, batches: list[As], hyper: Hyper, algorithm: Algorithm, within: float) -> None:
    """Train alone and together, and compare every figure of every device."""
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    stack = stack_networks(model.layers, batches[0].batches.examples.inputs.shape[1:])
    assert stack is not None
    found, correct = correction_of(algorithm)
    assert found
    for one, own in zip(train(stack, start, batches, hyper, correct), batches, strict=True):
        _, alone = algorithm.local(model, State(), start, own, own.batches.assignment)
        assert one.tree.keys() == alone.tree.keys()
        largest = max(float((start[key] + leaf).abs().max()) for key, leaf in alone.tree.items())
        for key, leaf in alone.tree.items():
            assert one.tree[key].shape == leaf.shape
            assert float((one.tree[key] - leaf).abs().max()) <= within * largest, key
        assert (one.weight, one.num_examples) == (alone.weight, alone.num_examples)
        assert (one.loss is None) == (alone.loss is None)
        assert one.loss is None or one.loss == pytest.approx(alone.loss, rel=1e-4)


hypers = st.builds(
    Hyper,
    local_epochs=st.integers(0, 2),
    batch_size=st.integers(1, 6),
    learning_rate=st.sampled_from([0.01, 0.1]),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    step_options=st.sampled_from(
        [msgspec.UNSET, *(StepOptions(optimizer=name, eps=1e-3) for name in ("adam", "adamw"))]
    ),
)
counts = st.lists(st.integers(1, 13), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(hypers, counts, st.integers(1, 9), st.integers(1, 7), st.sampled_from(STACKED), st.integers(0, 99))
def test_a_perceptron_learns_together_what_it_learns_alone(hyper, counts, features, hidden, name, seed):
    """For any shapes, batch sizes, unequal shares, seeds, momentum and decay; in double precision to ten digits."""
    with seed_torch(seed):
        model = network(mlp(features, hidden, CLASSES).layers, torch.float64)
    require_same(model, cohort((features,), counts, hyper, seed, torch.float64), hyper, ALGORITHMS[name](), FLOAT64)


@settings(max_examples=20, deadline=None)
@given(hypers, counts, st.integers(1, 3), st.sampled_from([4, 8]), st.integers(1, 3), st.integers(0, 99))
def test_a_convolutional_network_learns_together_what_it_learns_alone(hyper, counts, channels, side, width, seed):
    """The same of pictures, whose devices are groups of one convolution."""
    with seed_torch(seed):
        model = network(cnn(channels, side, width, 4, CLASSES).layers, torch.float64)
    batches = cohort((channels, side, side), counts, hyper, seed, torch.float64)
    require_same(model, batches, hyper, ALGORITHMS["fedprox"](mu=0.5), FLOAT64)


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("devices", [1, 2, 7])
def test_single_precision_agrees_within_its_rounding(name, devices):
    """With the kernels that replays use, one device alone included: five digits after ten steps."""
    hyper = msgspec.structs.replace(HYPER, momentum=0.5, local_epochs=2, batch_size=8)
    with seed_torch(3):
        model = network(cnn(1, 12, 8, 16, CLASSES).layers)
    require_same(
        model, cohort((1, 12, 12), [40 - 3 * k for k in range(devices)], hyper), hyper, ALGORITHMS[name](), FLOAT32
    )


LENET = nn.Sequential(
    nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2, bias=False),
    nn.Tanh(),
    nn.AvgPool2d(2, ceil_mode=True),
    nn.Conv2d(4, 6, 3, padding="same"),
    nn.ReLU(),
    nn.MaxPool2d(2, padding=1),
    nn.Flatten(),
    nn.Linear(24, CLASSES, bias=False),
)


def test_strides_groups_and_missing_biases_are_kept():
    """All that a convolution can be told; and a ReLU that pooling overtakes."""
    model = network(LENET, torch.float64)
    require_same(model, cohort((2, 9, 9), [7, 3], HYPER, 1, torch.float64), HYPER, fedavg(), FLOAT64)


def test_an_activation_that_stands_twice_acts_twice():
    """One object at two places of the chain."""
    relu = nn.ReLU()
    model = network(nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, CLASSES)), torch.float64)
    require_same(model, cohort((3,), [7, 3], HYPER, 1, torch.float64), HYPER, fedavg(), FLOAT64)


def test_a_device_that_diverges_harms_no_other():
    """Its numbers become infinite; its neighbours in the stack do not see it."""
    model = network(mlp(3, 4, CLASSES).layers)
    batches = cohort((3,), [9, 9, 8], HYPER)
    batches[1].batches.examples.inputs.fill_(float("inf"))
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    stack = stack_networks(model.layers, torch.Size([3]))
    results = train(stack, start, batches, HYPER)
    assert [all(bool(leaf.isfinite().all()) for leaf in one.tree.values()) for one in results] == [True, False, True]


class Twice(nn.Linear):
    """Another thing than what it derives from."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return 2 * super().forward(input)


class Noisy(nn.Linear):
    """A layer that draws numbers, and says nothing of it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return functional.dropout(super().forward(input))


class Residual(nn.Module):
    """A plain module with functions in its forward, and a layer that it uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(inputs))
        return self.last(hidden + self.block(functional.relu(self.block(hidden))))


SHARED, FROZEN = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
VECTORISED = {
    "a class of its own": nn.Sequential(Twice(4, CLASSES)),
    "a nested chain": nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, CLASSES)),
    "no chain": nn.Linear(4, CLASSES),
    "a plain module": Residual(),
    "windows": nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(15), nn.Linear(15, CLASSES)),
}


@pytest.mark.parametrize("name", VECTORISED)
@pytest.mark.parametrize("counts", [[9], [8, 8], [13, 7, 2]], ids=str)
def test_a_network_that_is_no_chain_learns_together_what_it_learns_alone(name, counts):
    example = (2, 7) if name == "windows" else (4,)
    with seed_torch(1):
        model = network(copy.deepcopy(VECTORISED[name]), torch.float64)
    batches = cohort(example, counts, HYPER, 1, torch.float64)
    require_same(model, batches, HYPER, ALGORITHMS["fedprox"](mu=0.5), FLOAT64)
    assert devices_per_pass(model.layers, torch.Size(example), 8) == MOST


def relative_of_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is no mean over examples."""
    return ((outputs - targets) ** 2).sum() / (targets**2).sum()


OBJECTIVES = {
    "class weights": ObjectiveSpec(class_weights=(1.0, 2.0, 0.5, 1.0, 3.0), label_smoothing=0.1),
    "multilabel": ObjectiveSpec(kind="multilabel"),
    **{
        loss: ObjectiveSpec(kind="regression", loss=loss, loss_options={"q": 0.9} if loss == "quantile" else {})
        for loss in ("mse", "mae", "huber", "quantile")
    },
    "anomaly": ObjectiveSpec(kind="anomaly"),
    "own": ObjectiveSpec(kind="regression", loss=f"{__name__}:relative_of_batch", metrics=("mae",)),
}


@dataclass(frozen=True)
class For:
    """A task's batches with targets for an objective."""

    batches: As
    objective: TrainingObjective

    @property
    def num_examples(self) -> int:
        return self.batches.num_examples

    def __iter__(self):
        for inputs, labels in self.batches:
            if self.objective.reconstructs:
                yield inputs, inputs
            elif self.objective.kind == "classification":
                yield inputs, labels
            else:
                wide = functional.one_hot(labels, CLASSES).to(inputs.dtype)
                yield inputs, wide if self.objective.kind == "multilabel" else 0.5 + wide.cumsum(1)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    "layers", [mlp(CLASSES, 6, CLASSES).layers, nn.Sequential(Twice(CLASSES, CLASSES))], ids=["chain", "plain"]
)
@pytest.mark.parametrize("counts", [[8, 8], [13, 7, 2]], ids=str)
def test_every_task_learns_together_what_its_devices_learn_alone(name, layers, counts):
    registry.allow([f"{__name__}:*"])
    objective = build_training_objective(OBJECTIVES[name])
    model = replace(network(copy.deepcopy(layers), torch.float64), objective=objective)
    batches = [For(each, objective) for each in cohort((CLASSES,), counts, HYPER, 1, torch.float64)]
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    stack = stack_networks(model.layers, torch.Size([CLASSES]))
    for result, own in zip(train(stack, start, batches, HYPER, objective=objective), batches, strict=True):
        _, alone = local_sgd(model, State(), start, own, Assignment(seed=0, hyper=HYPER))
        for key, leaf in alone.tree.items():
            assert float((result.tree[key] - leaf).abs().max()) <= FLOAT64 * float(leaf.abs().max()), key
        assert result.loss == pytest.approx(alone.loss, rel=1e-6)
    registry.allow([])


REFUSED = {
    "chance": nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)),
    "buffers": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "a shared layer": nn.Sequential(SHARED, nn.ReLU(), SHARED),
    "a layer that stands still": nn.Sequential(FROZEN, nn.Linear(4, 4)),
    "chance in its forward": Noisy(4, 4),
    "recurrence": nn.GRU(4, 4),
    "an end that is no vector": nn.Sequential(nn.Conv2d(1, 4, 2)),
    "a mirrored border": nn.Sequential(nn.Conv2d(1, 4, 2, padding=1, padding_mode="reflect"), nn.Flatten()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_stacked_is_left_to_training_alone(why):
    """Rather no answer than a wrong one."""
    example = torch.Size([1, 2, 2]) if why in {"an end that is no vector", "a mirrored border"} else torch.Size([4])
    assert stack_networks(REFUSED[why], example) is None
    assert devices_per_pass(REFUSED[why], example, 8) == 1


def test_only_local_sgd_is_done_together():
    """A half that somebody puts in its place, or that is told more, is not; a correction is handed on."""
    assert correction_of(fedavg()) == (True, None)
    assert correction_of(ALGORITHMS["fedprox"]())[1] is not None
    for half in (lambda *_: None, partial(Model), partial(LocalSgd(), State()), local_sgd):
        assert correction_of(Algorithm(*[None] * 3, half, None, None)) == (False, None)


def test_small_networks_share_a_pass_and_large_ones_do_not():
    """By their shapes, at 16 MiB: 4 * (4 weights + batch * activations) bytes a device, 8 to 32 devices."""
    picture = torch.Size([1, 28, 28])
    small, large = cnn(width=8, hidden=76), cnn(width=32, hidden=512)
    weights = 80 + 1168 + 392 * 2 * 76 + 76 + 770
    numbers = 784 + 6272 + 2 * 1568 + 3136 + 2 * 784 + 784 + 2 * 76 + 10
    assert devices_per_pass(small.layers, picture, 8) == (16 << 20) // (4 * (4 * weights + 8 * numbers)) == 11
    assert devices_per_pass(small.layers, picture, 32) == 1  # five would have room
    assert devices_per_pass(large.layers, picture, 8) == 1
    assert devices_per_pass(mlp().layers, torch.Size([64]), 32) == MOST
    assert devices_per_pass(mlp().layers, torch.Size([64]), 1 << 20) == 1


@pytest.mark.parametrize("option", ["clip_norm = 1.0", 'precision = "bfloat16"', 'optimizer = "adam"'])
def test_devices_whose_gradients_have_a_common_norm_or_scale_train_alone(tmp_path, option):
    """Adam's moments are each parameter's own."""
    model = 'name = "mlp"\noptions = { features = 64, hidden = 8, classes = 10 }'
    plan = load(write_plan(tmp_path, model=model, hyper=f"batch_size = 8\n{option}"), tmp_path)
    assert (divide_cohort(plan, 40, torch.Size([64])) > 1) == option.startswith("optimizer")
