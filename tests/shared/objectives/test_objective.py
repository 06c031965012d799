"""Losses in torch and numpy agree, metrics add over devices, and misfits are refused with both shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shared import registry
from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.models.evaluate import require_matching_examples, score
from shared.objectives.array_losses import loss_sum
from shared.objectives.metric_sums import MetricSums, merge_sums
from shared.objectives.training import build_training_objective
from shared.protocol.objective import ObjectiveSpec, Target

GENERATOR = torch.Generator().manual_seed(3)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def classes(*shape: int, below: int = 4) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=GENERATOR)


CASES = {
    "classification": (ObjectiveSpec(), draw(40, 4), classes(40)),
    "weighted": (
        ObjectiveSpec(
            class_weights=(1.0, 2.0, 0.5, 3.0), label_smoothing=0.1, metrics=("balanced_accuracy", "macro_f1")
        ),
        draw(40, 4),
        classes(40),
    ),
    "two classes": (ObjectiveSpec(metrics=("auroc", "accuracy")), draw(40, 2), classes(40, below=2)),
    "multilabel": (ObjectiveSpec(kind="multilabel"), draw(40, 3), (draw(40, 3) > 0).float()),
    "regression": (ObjectiveSpec(kind="regression"), draw(40, 2), draw(40, 2) + 5),
    "huber": (ObjectiveSpec(kind="regression", loss="huber", loss_options={"delta": 0.4}), draw(40, 1), draw(40, 1)),
    "mae": (ObjectiveSpec(kind="regression", loss="mae"), draw(40, 1), draw(40)),
    "quantile": (
        ObjectiveSpec(kind="forecast", loss="quantile", loss_options={"q": 0.9}, metrics=("quantile_loss", "mae")),
        draw(40, 6),
        draw(40, 6),
    ),
    "segmentation": (ObjectiveSpec(kind="segmentation"), draw(40, 4, 5, 5), classes(40, 5, 5)),
    "dice": (ObjectiveSpec(kind="segmentation", loss="dice"), draw(40, 4, 5, 5), classes(40, 5, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_boards_without_torch_compute_the_same_loss(name: str) -> None:
    spec, outputs, targets = CASES[name]
    objective = build_training_objective(spec)
    expected = objective.loss_sum(outputs, targets).item()
    assert loss_sum(spec, outputs.numpy(), targets.numpy()) == pytest.approx(expected, rel=1e-5)
    assert objective.loss(outputs, targets).item() == pytest.approx(expected / 40, rel=1e-5)
    parts = objective.part_losses(outputs, targets, [10, 30])
    assert sum(part.item() * size for part, size in zip(parts, (10, 30), strict=True)) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_devices_equal_those_of_their_pooled_examples(name: str) -> None:
    spec, outputs, targets = CASES[name]
    objective, parts = build_training_objective(spec), []
    pooled = objective.values(objective.sums(outputs.numpy(), targets.numpy(), outputs.numpy()))
    for begin, end in ((0, 3), (3, 20), (20, 40)):
        tally = MetricSums(objective)
        tally.add(outputs[begin:end].numpy(), targets[begin:end].numpy(), outputs[begin:end].numpy())
        parts.append(tally.lists())
    assert merge_sums(objective, parts) == pytest.approx(pooled, abs=1e-6)
    assert pooled.keys() == objective.metrics.keys()


def test_metrics_equal_their_definitions() -> None:
    outputs, targets = draw(200, 2), classes(200, below=2)
    scores, positive = (outputs[:, 1] - outputs[:, 0]).numpy(), targets.numpy() > 0
    pairs = scores[positive][:, None] - scores[~positive][None]
    spec = ObjectiveSpec(metrics=("auroc", "balanced_accuracy", "macro_f1"))
    objective = build_training_objective(spec)
    found = objective.values(objective.sums(outputs.numpy(), targets.numpy(), outputs.numpy()))
    assert found["auroc"] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=5e-3)
    hits = outputs.argmax(1) == targets
    assert found["balanced_accuracy"] == pytest.approx(
        np.mean([hits[targets == label].float().mean() for label in (0, 1)])
    )
    scores_f1 = []
    for label in (0, 1):
        chosen, actual = outputs.argmax(1) == label, targets == label
        scores_f1.append(2 * (chosen & actual).sum().item() / (chosen.sum() + actual.sum()).item())
    assert found["macro_f1"] == pytest.approx(np.mean(scores_f1))
    numbers, wanted = draw(50, 1), draw(50, 1) * 3 + 1
    regression = build_training_objective(ObjectiveSpec(kind="regression"))
    values = regression.values(regression.sums(numbers.numpy(), wanted.numpy(), numbers.numpy()))
    errors = (numbers - wanted).double()
    assert values["rmse"] == pytest.approx(errors.square().mean().sqrt().item())
    assert values["mae"] == pytest.approx(errors.abs().mean().item())
    spread = (wanted - wanted.mean()).double().square().sum()
    assert values["r2"] == pytest.approx(1 - (errors.square().sum() / spread).item(), abs=1e-6)


def test_an_anomaly_is_what_the_network_cannot_reproduce() -> None:
    objective = build_training_objective(ObjectiveSpec(kind="anomaly", metrics=("auroc", "mae")))
    inputs = torch.cat([torch.zeros(20, 3), torch.ones(5, 3)])
    labels = torch.cat([torch.zeros(20), torch.ones(5)]).long()
    network = nn.Linear(3, 3)
    nn.init.zeros_(network.weight)
    nn.init.constant_(network.bias, 0.1)
    found = score(network, dict(network.state_dict()), Examples(inputs, labels), objective)
    assert found.metrics == pytest.approx({"auroc": 1.0, "mae": 0.1})
    assert found.loss == pytest.approx(0.01)
    assert found.accuracy is None
    trained = Examples(inputs, labels).as_reconstruction()
    assert len(trained) == 20
    assert torch.equal(trained.labels, trained.inputs)


def test_the_default_objective_keeps_the_bits_of_cross_entropy() -> None:
    outputs, targets = draw(64, 10), classes(64, below=10)
    assert torch.equal(build_training_objective().loss(outputs, targets), functional.cross_entropy(outputs, targets))


@pytest.mark.parametrize(
    ("spec", "labels", "named"),
    [
        (ObjectiveSpec(kind="regression"), torch.zeros(4, 3), ("2", "3")),
        (ObjectiveSpec(kind="regression"), torch.zeros(4).long(), ("target_columns",)),
        (ObjectiveSpec(), torch.zeros(4, 2), ("2", "regression")),
        (ObjectiveSpec(), torch.tensor([0, 1, 2, 0]), ("3",)),
        (ObjectiveSpec(class_weights=(1.0, 1.0, 1.0)), torch.zeros(4).long(), ("class_weights",)),
        (ObjectiveSpec(kind="segmentation"), torch.zeros(4, 6, 6).long(), ("6x6",)),
        (ObjectiveSpec(kind="anomaly"), torch.zeros(4).long(), ("5", "2")),
    ],
)
def test_targets_that_do_not_fit_the_outputs_are_refused(
    spec: ObjectiveSpec, labels: torch.Tensor, named: tuple[str, ...]
) -> None:
    network = nn.Sequential(nn.Linear(5, 2))
    with pytest.raises(ConfigError) as refused:
        require_matching_examples(network, {}, Examples(draw(4, 5), labels), objective=build_training_objective(spec))
    assert all(part in str(refused.value) for part in named)


def test_specs_out_of_range_are_refused() -> None:
    for fields in (
        {"label_smoothing": 1.0},
        {"kind": "regression", "class_weights": (1.0,)},
        {"class_weights": (0.0, 1.0)},
        {"kind": "custom"},
        {"metrics": ("mae", "mae")},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            ObjectiveSpec(**fields)
    for spec in (
        ObjectiveSpec(metrics=("rmse",)),
        ObjectiveSpec(metrics=("accuracy",), target=Target(metric="iou")),
        ObjectiveSpec(metrics=("nonsense",)),
    ):
        with pytest.raises(ConfigError):
            build_training_objective(spec)
    with pytest.raises(ConfigError):
        _ = build_training_objective(ObjectiveSpec(loss="nonsense")).loss_function
    assert build_training_objective(ObjectiveSpec(kind="regression")).direction == "min"
    assert build_training_objective(ObjectiveSpec(target=Target(metric="loss"))).direction == "min"
    assert math.isnan(
        build_training_objective(ObjectiveSpec(metrics=("auroc",))).metrics["auroc"].value(np.zeros(2048))
    )


def test_a_loss_of_the_user_gets_outputs_of_the_targets_shape():
    """A network that returns (N,) for targets (N, 1) would otherwise be trained on all N x N differences."""
    registry.allow(["torch.nn.functional:mse_loss"])
    try:
        own = build_training_objective(ObjectiveSpec(kind="regression", loss="torch.nn.functional:mse_loss"))
        outputs, targets = draw(8), draw(8, 1)
        assert torch.equal(own.loss(outputs, targets), functional.mse_loss(outputs[:, None], targets))
    finally:
        registry.allow([])
