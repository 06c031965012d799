"""The teacher: the recursion of an exponential average, a plain mean first, BatchNorm's figures with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.algorithms.semisupervised.teacher import ema_decay, update_teacher


def test_it_is_the_plain_mean_of_all_students_until_that_is_slower_than_gamma():
    students = [{"w": torch.tensor([float(number), 1.0])} for number in (3, 5, 10, 2)]
    teacher = {"w": torch.tensor([100.0, -1.0])}
    for step, student in enumerate(students):
        teacher = update_teacher(teacher, student, ema_decay(step, 0.99))
    assert teacher["w"].tolist() == pytest.approx([5.0, 1.0])


def test_after_that_it_is_the_recursion():
    assert [ema_decay(step, 0.99) for step in (98, 99, 100, 5000)] == pytest.approx([1 - 1 / 99, 0.99, 0.99, 0.99])
    teacher, student = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -2.0])}
    assert update_teacher(teacher, student, 0.9)["w"].tolist() == pytest.approx([1.2, 1.6])
    assert teacher["w"].tolist() == [1.0, 2.0], "the teacher before it is nobody's to change"


def test_running_statistics_follow_too_and_the_counter_is_the_students():
    layer = nn.BatchNorm1d(3)
    teacher = {name: leaf.clone() for name, leaf in layer.state_dict().items()}
    layer(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)) * 3 + 1)
    student = layer.state_dict()
    after = update_teacher(teacher, student, 0.5)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(after[name], (teacher[name] + student[name]) / 2)
    assert (int(after["num_batches_tracked"]), after["num_batches_tracked"].dtype) == (1, torch.int64)
    student["num_batches_tracked"].add_(5)
    assert int(after["num_batches_tracked"]) == 1, "it shares no memory with the student's"
