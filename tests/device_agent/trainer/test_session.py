"""Split task in process: results, random draws, state, time spent waiting."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest
import torch

from device_agent.exchange import outbox
from device_agent.measurement.task_meter import ProcessMeter
from device_agent.trainer.perform import begin_split_training
from device_agent.trainer.split_training import SplitTraining
from device_agent.trainer.task import ALONE
from shared.codecs.dense import dense
from shared.errors import Superseded, TaskFailed
from shared.protocol.messages import Missed, Spec, derive_seed
from shared.protocol.payload import pack, unpack
from tests.device_agent.agent_side import METER, update_of
from tests.device_agent.server_side import STEPS, answer, below, finish, split


@pytest.fixture
def begin(device, make_task, parameters):
    """Prepare a split task; return its training, not entered yet, and its draft."""

    def start(meter=METER.task, superseded=lambda: False, job=None, **fields):
        task = split(make_task(), **fields)
        draft = device.outbox.draft(task.run, task.round)
        given = {"params": below(device.folder, parameters)} | (job or {})
        one = msgspec.structs.replace(device.make_job(task, draft), **given)
        return begin_split_training(one, device.workspace, meter, superseded), draft

    return start


def test_a_session_yields_a_payload_a_step_and_leaves_a_whole_update(begin, device) -> None:
    """The update has the part below the cut alone; nothing of the network above it was ever made."""
    splitting, draft = begin()
    with splitting as training:
        for step in range(1, STEPS + 1):
            assert training.step == step
            with training.time_exchange():
                down = answer(training.up)
            training.advance(down)
        assert training.up is None
        training.carried = 1234, 567
    update = update_of(draft)
    assert update.num_examples == STEPS * 8 - 2  # 30 examples in batches of 8: the fourth has six
    assert (update.cost.features_bytes, update.cost.gradient_bytes) == (1234, 567)
    assert update.cost.exchange_s > 0
    tree = dense().decode(unpack(memoryview(bytearray((draft / outbox.PAYLOAD).read_bytes())))).tree
    assert tree.keys() == {"1.weight", "1.bias"}
    assert "network" not in device.workspace.latest
    assert all(leaf.is_meta for leaf in device.workspace.latest["skeleton"][1][1].values())


def test_sessions_that_take_turns_in_one_process_learn_what_each_learns_alone(begin, device) -> None:
    """Bit for bit, though both drop features and round gradients at random, and though others draw in between."""
    alone = {}
    for number, name in enumerate("ab"):
        work, draft = begin(run=name, device=name, round=number + 1)
        finish(work)
        alone[name] = (draft / outbox.PAYLOAD).read_bytes()
    works = {name: begin(run=f"{name}2", device=name, round=number + 1)[0] for number, name in enumerate("ab")}
    drafts = {name: device.folder / "outbox" / f".{name}2@{number + 1:06d}" for number, name in enumerate("ab")}
    for draft in drafts.values():
        draft.mkdir(exist_ok=True)  # making a draft cleans away those of others
    with ExitStack() as stack:
        trainings = [stack.enter_context(work) for work in works.values()]
        while any(training.up is not None for training in trainings):
            for training in trainings:
                torch.rand(3)
                training.advance(answer(training.up))
    assert {name: (draft / outbox.PAYLOAD).read_bytes() for name, draft in drafts.items()} == alone


def test_every_step_draws_as_its_own_number_says_and_leaves_torch_s_generator_as_it_was(make_task) -> None:
    """Also the step after some that were missed, and also what the codec draws."""
    drawn, task = [], split(make_task())

    def session():
        while True:
            drawn.append(torch.initial_seed())
            down = yield {"features": torch.rand(2)}
            if isinstance(down, Missed) and down.steps > 5:
                return "ended"

    class Quiet:
        def measure_exchange(self):
            return METER.task()

    before = torch.random.get_rng_state()
    training = SplitTraining(session(), task, Quiet())
    down = memoryview(bytearray(b"".join(pack(dense().encode({"gradient": torch.ones(1)}, None)[0]))))
    training.advance(down)
    training.advance(Missed(3))
    assert training.up is not None
    training.advance(Missed(6))
    assert (training.up, training.outcome) == (None, "ended")
    assert drawn == [derive_seed(5, step, "board") for step in (1, 2, 5)]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_the_server_takes_is_exchange_and_not_computing(begin) -> None:
    """On a clock that moves only while the work waits: every second of it is exchange."""
    now = [100.0]
    splitting, draft = begin(meter=ProcessMeter(clock=lambda: now[0]).task)
    with splitting as training:
        while training.up is not None:
            with training.time_exchange():
                now[0] += 7.0
            training.advance(answer(training.up))
    cost = update_of(draft).cost
    assert (cost.exchange_s, cost.compute_s) == (7.0 * STEPS, 0.0)
    assert cost.provenance["exchange_s"].quality == "measured"


def test_a_session_that_misses_everything_still_ends_with_an_update(begin) -> None:
    """What it was given goes up again, with no loss: nothing was learned, and nothing pretends so."""
    splitting, draft = begin()
    with splitting as training:
        training.advance(Missed(STEPS))
        assert training.up is None
    assert update_of(draft).loss is None


def test_a_superseded_session_ends_at_its_next_batch_and_leaves_no_update(begin) -> None:
    splitting, draft = begin(superseded=iter([False, True]).__next__)
    with pytest.raises(Superseded):
        finish(splitting)
    assert not (draft / outbox.UPDATE).exists()


def test_a_step_s_bytes_are_views_of_the_features_and_not_copies(make_task) -> None:
    features = torch.rand(1000)

    def session():
        yield {"features": features}

    class Quiet:
        def measure_exchange(self):
            return METER.task()

    parts = SplitTraining(session(), split(make_task()), Quiet()).up
    before = bytes(parts[-1])
    features.zero_()
    assert bytes(parts[-1]) != before


@pytest.mark.parametrize("fields", [{"evaluate": True}, {"measure_s": 1.0}, {"train": False}])
def test_what_needs_the_whole_network_is_refused(begin, fields) -> None:
    with pytest.raises(TaskFailed, match=ALONE):
        finish(begin(**fields)[0])


def test_who_cannot_exchange_steps_says_so(device, make_task, parameters) -> None:
    """`perform` is for jobs that a device does alone; and a method of one kind is not run as the other."""
    with pytest.raises(TaskFailed, match=ALONE):
        device.perform(split(make_task()), params=below(device.folder, parameters))


def test_parameters_of_another_network_are_refused(begin) -> None:
    with pytest.raises(Exception, match="shape"):
        finish(begin(model=Spec(name="mlp", options={"features": 5, "hidden": 8, "classes": 2}))[0])
