"""Timing training steps before a training."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.step_timing import BLOCKS, WARM_STEPS, Steps, time_steps
from shared.errors import TaskFailed


class Pairs:
    """Three batches an epoch, told apart by their label."""

    num_examples = 3

    def __iter__(self):
        return iter([(torch.zeros(1, 1), torch.tensor([label])) for label in range(3)])

    def inputs_at(self, places):
        return places.double()


class Nothing(Pairs):
    num_examples = 0


class Board:
    """Steps that take a second and two joules each, but for the first ones, which take ten times as long."""

    def __init__(self) -> None:
        self.now, self.trained = 0.0, []

    def train(self, batches) -> None:
        labels = [int(labels) for _, labels in batches]
        self.now += len(labels) * (1.0 if self.trained else 10.0)
        self.trained.append(labels)

    @contextmanager
    def meter(self):
        spent, started = BlockCost(), self.now
        yield spent
        spent.compute_s = self.now - started
        spent.joules, spent.cycles = 2 * spent.compute_s, 1e9 * spent.compute_s
        spent.idle_w, spent.mean_hertz = 0.5, 1e9


def test_steps_begin_anew_where_the_examples_end():
    assert [int(labels) for _, labels in Steps(Pairs(), 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_examples_by_place_are_those_of_the_training():
    assert Steps(Pairs(), 7).inputs_at(torch.tensor([2, 0])).tolist() == [2.0, 0.0]


def test_the_first_steps_do_not_count():
    """35 seconds are five blocks of seven steps of one second, whatever the slow first one took."""
    board = Board()
    cost = time_steps(board.train, Pairs(), board.meter, seconds=35.0, weights=5, flops=11)
    assert [len(labels) for labels in board.trained] == [WARM_STEPS, 1, 1, *[7] * BLOCKS]
    assert (cost.steps, cost.seconds, cost.joules, cost.cycles) == (35, 1.0, 2.0, 1e9)
    assert (cost.idle_w, cost.hertz, cost.weights, cost.flops) == (0.5, 1e9, 5, 11)


def test_at_least_one_step_a_block_is_timed_however_slow_it_is():
    board = Board()
    assert time_steps(board.train, Pairs(), board.meter, seconds=0.1, weights=1, flops=1).steps == BLOCKS


def test_a_block_in_which_the_board_was_busy_otherwise_does_not_count():
    """One of five takes nine times as long: seconds and cycles are those of the others, joules at the mean power."""
    board = Board()

    def train(batches):
        board.train(batches)
        if len(board.trained) == 4:
            board.now += 8 * len(board.trained[-1])

    cost = time_steps(train, Pairs(), board.meter, seconds=10.0, weights=1, flops=1)
    assert (cost.seconds, cost.joules, cost.cycles) == (1.0, 2.0, 1e9)


@pytest.mark.parametrize("held_up", [2, 3])
def test_a_board_that_is_held_up_while_blocks_are_sized_has_them_long_enough_all_the_same(held_up):
    board = Board()

    def train(batches):
        board.train(batches)
        if len(board.trained) == held_up:
            board.now += 100

    assert time_steps(train, Pairs(), board.meter, seconds=35.0, weights=1, flops=1).steps == 35


def test_without_a_sensor_there_are_no_joules():
    board = Board()

    @contextmanager
    def blind():
        with board.meter() as spent:
            yield spent
        spent.joules = spent.cycles = spent.idle_w = None

    cost = time_steps(board.train, Pairs(), blind, seconds=2.0, weights=1, flops=1)
    assert (cost.seconds, cost.joules, cost.cycles, cost.idle_w) == (1.0, None, None, None)


def test_a_device_without_examples_says_so():
    with pytest.raises(TaskFailed, match="example"):
        time_steps(Board().train, Nothing(), Board().meter, seconds=1.0, weights=1, flops=1)
