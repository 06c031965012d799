"""A task that only measures: real steps are timed, nothing of them is kept."""

from __future__ import annotations

import time

import pytest
import torch

from device_agent.config import BoardConfig
from device_agent.exchange import outbox
from device_agent.measurement.board import Meters
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.trainer.interface import Job
from device_agent.trainer.step_timing import BLOCKS, ENOUGH, PAIR
from device_agent.trainer.workspace import Workspace
from shared.data.spec import Data
from shared.models.cost import step_flops
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper
from tests.device_agent.agent_side import update_of
from tests.device_agent.sources import Hand
from tests.machine import grow


def test_real_steps_are_timed_and_nothing_is_kept(device, make_task) -> None:
    """For as long as the task says, and no longer told than it took; no parameters, no state, the next task as ever."""
    measuring = make_task(train=False, measure_s=0.2, assignment=Assignment(seed=1, hyper=Hyper(batch_size=10)))
    began = time.monotonic()
    draft = device.perform(measuring)
    took_s = time.monotonic() - began
    update = update_of(draft)
    step = update.step
    assert (update.params, update.failure, (draft / outbox.STATE).exists()) == (None, None, False)
    assert step.steps > 1
    # Only the pair that sizes blocks is sure to be long enough: a board that was busy then is quicker after. And only
    # three of five blocks are sure to last as long as the median.
    assert took_s >= PAIR / BLOCKS * ENOUGH * measuring.measure_s
    assert 0 < 3 / BLOCKS * step.steps * step.seconds < took_s
    own = device.workspace.latest["examples"][1][0]
    assert step.flops == step_flops(measuring.model, own.inputs.shape[1:], 10)
    assert step.weights == sum(leaf.numel() for leaf in device.workspace.model(measuring.model).layers.parameters())
    assert step.joules is None

    trained = make_task(assignment=Assignment(seed=1, hyper=Hyper(batch_size=10)))
    after = (device.perform(trained) / outbox.PAYLOAD).read_bytes()
    device.workspace = Workspace()
    assert (device.perform(trained) / outbox.PAYLOAD).read_bytes() == after


def test_a_batch_is_never_larger_than_the_device_has_examples(device, make_task) -> None:
    """30 examples: a batch size of 1000 counts as 30; no epochs of training still measure a step."""
    task = make_task(
        train=False, measure_s=0.05, assignment=Assignment(seed=1, hyper=Hyper(batch_size=1000, local_epochs=0))
    )
    step = update_of(device.perform(task)).step
    assert step.flops == step_flops(task.model, torch.Size([4]), 30)


def test_three_hours_of_training_have_their_joules(tmp_path, make_task) -> None:
    """An epoch may take long on such a board: 2 W, sampled once a second, more often than a log holds by itself."""
    chip = grow(tmp_path, {"sys/class/hwmon/hwmon0/name": "ina219", "sys/class/hwmon/hwmon0/power1_input": 2_000_000})
    told = MeasurementSettings(board=BoardConfig(root=str(chip), profile="generic-arm", sample_hz=1.0))
    paths = {"params": "", "state": "", "draft": ""}
    data = Data(source="digits")
    job = Job(task=make_task(), **paths, data=data, frame_bytes=1, cost=Cost(), measuring=told)
    power = Meters().meter_for(job.measuring, job.cost.idle_w).power
    power.__exit__()
    power.clock = power.source.clock = clock = Hand(power.clock())
    start = clock.now
    for _ in range(3 * 3600):
        clock.now += 1.0
        power.mark()
    found = power.energy(start, clock.now)
    assert found.joules == pytest.approx(2.0 * 3 * 3600)
    assert found.covered_ratio > 0.99
