"""Number of training threads: the fastest, stored, and measured again after drift."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from device_agent.trainer.step_timing import forward_backward
from device_agent.trainer.threads import FILE, ThreadTuner, find_fastest, list_candidates


class Machine:
    """A clock on which a step takes the seconds that are given for the number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now, self.count, self.steps = seconds, 0.0, 0, 0

    def apply(self, count: int) -> None:
        self.count = count

    def step(self) -> None:
        self.steps += 1
        self.now += self.seconds.get(self.count, 1.0)

    def threads(self, cpus: int = 8) -> ThreadTuner:
        return ThreadTuner(cpus, self.apply, lambda: self.now)


@pytest.mark.parametrize(
    ("cpus", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two_and_all_processors_are_tried(cpus, counts):
    assert list_candidates(cpus) == counts


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=6))
def test_the_number_is_about_as_fast_as_the_best_that_was_tried(seconds):
    told = dict(zip(list_candidates(1 << (len(seconds) - 1)), seconds, strict=True))
    count, found = find_fastest(list(told), told.__getitem__)
    assert found[count] <= 1.03 * min(found.values())
    assert found.items() <= told.items()


def test_of_equally_fast_numbers_the_least_is_taken_and_much_slower_ones_end_the_trial():
    assert find_fastest([1, 2, 4], {1: 1.0, 2: 0.99, 4: 0.98}.__getitem__)[0] == 1
    count, found = find_fastest([1, 2, 4, 8], {1: 1.0, 2: 1.5, 4: 0.1}.__getitem__)
    assert (count, list(found)) == (1, [1, 2])


def test_what_was_found_is_kept_for_the_next_trainer_and_for_each_network(tmp_path):
    machine = Machine({1: 0.04, 2: 0.02, 4: 0.01, 8: 0.03})
    machine.threads().use(tmp_path, ["cnn", (32, 1, 8, 8)], machine.step)
    assert machine.count == 4
    timed = machine.steps
    again = machine.threads()
    again.use(tmp_path, ["cnn", (32, 1, 8, 8)], machine.step)
    assert (machine.count, machine.steps) == (4, timed)
    again.use(tmp_path, ["vgg", (32, 1, 8, 8)], machine.step)
    assert machine.steps > timed
    machine.threads(cpus=2).use(tmp_path, ["cnn", (32, 1, 8, 8)], machine.step)
    assert machine.count == 2


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', '{"a": {"threads": "many"}}', "[]", "\0" * 200_000])
def test_a_damaged_file_is_written_anew(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    machine = Machine({1: 0.04, 2: 0.02})
    machine.threads(2).use(tmp_path, ["cnn"], machine.step)
    assert machine.count == 2
    assert [one["threads"] for one in json.loads((tmp_path / FILE).read_text()).values()] == [2]


def test_a_folder_that_takes_no_file_is_no_reason_not_to_train(tmp_path):
    machine = Machine({1: 0.04, 2: 0.02})
    machine.threads(2).use(tmp_path / "away", ["cnn"], machine.step)
    assert machine.count == 2


def test_with_one_processor_nothing_is_timed(tmp_path):
    machine = Machine({})
    machine.threads(1).use(tmp_path, ["cnn"], machine.step)
    assert (machine.count, machine.steps) == (1, 0)


@pytest.mark.parametrize(("factor", "is_timed"), [(1.4, False), (1.6, True), (0.6, False), (0.4, True)])
def test_steps_that_drift_by_more_than_half_in_two_tasks_are_timed_again(tmp_path, factor, is_timed):
    machine = Machine({1: 0.02, 2: 0.01})
    threads = machine.threads(2)

    def task(seconds: float) -> None:
        threads.use(tmp_path, ["cnn"], machine.step)
        for _ in range(10):
            threads.note(seconds)
        threads.end_task()

    task(0.01)
    timed = machine.steps
    task(0.01 * factor)
    task(0.01)  # once may be chance
    task(0.01 * factor)
    task(0.01 * factor)
    assert machine.steps == timed
    machine.seconds = {1: 0.01, 2: 0.05}  # somebody else is busy
    task(0.01 * factor)
    assert (machine.steps > timed, machine.count) == (is_timed, 1 if is_timed else 2)


def test_timing_changes_neither_the_network_nor_random_numbers():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3))
    layers[1].eval()
    before = {name: leaf.clone() for name, leaf in layers.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with forward_backward(layers, torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))) as step:
        assert layers[1].training
        step()
        assert not torch.equal(layers[1].running_mean, before["1.running_mean"])
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(leaf, before[name]) for name, leaf in layers.state_dict().items())
    assert not layers[1].training
    assert all(leaf.grad is None for leaf in layers.parameters())
