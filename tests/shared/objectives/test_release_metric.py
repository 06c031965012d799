"""Metrics of releases, with drops in their own sense."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shared.objectives.release_metric import drop_of, find_objective, measure
from shared.protocol.inference.release import ReleaseTask


def task(*metrics: str, kind: str = "regression", direction: str = "min") -> ReleaseTask:
    return ReleaseTask(kind=kind, metrics=metrics, direction=direction)


def test_a_release_without_a_task_is_compared_by_its_accuracy():
    objective = find_objective(msgspec.UNSET)
    outputs, labels = np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 0])
    assert measure(objective, lambda batch: batch, outputs, labels) == 0.75
    assert drop_of(objective, 0.70, 0.75) == pytest.approx(0.05)


def test_the_next_metric_stands_for_one_whose_code_is_not_allowed_here():
    assert find_objective(task("field:largest")) is None
    objective = find_objective(task("field:largest", "mae", "r2", direction="max"))
    assert (objective.metric, objective.direction) == ("mae", "min")
    inputs, targets = np.zeros((3, 2), np.float32), np.full((3, 2), 2.0, np.float32)
    assert measure(objective, lambda batch: batch, inputs, targets) == 2.0


def test_an_error_drops_relative_to_the_reference_and_a_share_by_the_difference():
    rmse = find_objective(task("rmse"))
    assert drop_of(rmse, 33.0, 30.0) == pytest.approx(0.1)
    assert drop_of(rmse, 27.0, 30.0) == pytest.approx(-0.1)
    assert drop_of(rmse, 0.1, 0.0) == float("inf")
    assert drop_of(rmse, 0.0, 0.0) == 0.0
    iou = find_objective(task("iou", kind="segmentation", direction="max"))
    assert drop_of(iou, 0.6, 0.7) == pytest.approx(0.1)
