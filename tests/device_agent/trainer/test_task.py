"""One task in process: what it leaves in the draft, and what it remembers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from device_agent.measurement.task_meter import BlockCost, FixedMeter
from device_agent.trainer.workspace import Workspace
from shared.codecs.dense import dense
from shared.errors import TaskFailed
from shared.protocol import payload
from shared.protocol.messages import Assignment, Hyper
from shared.tensors import file
from shared.tensors.tree import State
from tests.device_agent.agent_side import moved, update_of
from tests.naming import naming


def test_a_whole_update_is_written_and_nothing_is_committed(device, make_task) -> None:
    """The message describes the payload beside it; costs before training are kept, those of training added."""
    draft = device.perform(make_task(), FixedMeter(BlockCost(compute_s=4.0)).task)
    update, data = update_of(draft), (draft / outbox.PAYLOAD).read_bytes()
    assert (update.run, update.round, update.device, update.failure) == ("trial", 1, "board", None)
    assert (update.params.size, update.params.digest) == (len(data), payload.digest([memoryview(data)]))
    assert update.params.frame_bytes == 1024
    assert (update.num_examples, update.weight) == (30, 30.0)
    assert update.loss is not None
    assert update.metrics == {}
    cost = update.cost
    assert (cost.download_s, cost.compute_s, cost.cpu_s, cost.compute_joules) == (0.5, 4.0, None, None)
    assert (cost.bytes_down, cost.bytes_up) == (len((device.folder / "params").read_bytes()), len(data))
    assert device.outbox.entries() == []


def test_the_payload_is_how_far_training_moved(device, make_task, parameters) -> None:
    """Derivation: full-batch SGD of one epoch is one step, so the change is -learning_rate * gradient at the start."""
    hyper = Hyper(batch_size=100, learning_rate=0.5)
    draft = device.perform(make_task(assignment=Assignment(seed=1, hyper=hyper)))
    start = {
        key: leaf.clone().requires_grad_()
        for key, leaf in dense().decode(payload.unpack(memoryview(bytearray(parameters)))).tree.items()
    }
    own = device.workspace.latest["examples"][1][0]
    hidden = torch.relu(own.inputs @ start["1.weight"].T + start["1.bias"])
    loss = torch.nn.functional.cross_entropy(hidden @ start["3.weight"].T + start["3.bias"], own.labels)
    loss.backward()
    change = moved(draft)
    assert change.keys() == start.keys()
    for key, leaf in start.items():
        torch.testing.assert_close(change[key], -0.5 * leaf.grad, atol=1e-6, rtol=1e-4)
    assert update_of(draft).loss == pytest.approx(loss.item(), rel=1e-5)


def test_the_same_task_gives_the_same_bytes(device, make_task) -> None:
    """Whatever was trained before on the same bench, and in a fresh one; another seed gives others."""
    task = make_task(assignment=Assignment(seed=5, hyper=Hyper(batch_size=4, momentum=0.9, local_epochs=2)))
    first = (device.perform(task) / outbox.PAYLOAD).read_bytes()
    device.perform(make_task(round=2))
    assert (device.perform(task) / outbox.PAYLOAD).read_bytes() == first
    device.workspace = Workspace()
    assert (device.perform(task) / outbox.PAYLOAD).read_bytes() == first
    other = msgspec.structs.replace(task, assignment=Assignment(seed=6, hyper=task.assignment.hyper))
    assert (device.perform(other) / outbox.PAYLOAD).read_bytes() != first


def test_torch_s_own_generator_is_the_task_s_while_it_lasts_and_then_as_it_was(device, make_task) -> None:
    """What a layer or a codec draws is a function of the task's seed; asked at every batch."""
    before, seeds = torch.random.get_rng_state(), []
    device.perform(make_task(), superseded=lambda: seeds.append(torch.initial_seed()))
    assert set(seeds) == {make_task().assignment.seed}
    assert torch.equal(torch.random.get_rng_state(), before)


def test_evaluation_alone_sends_figures_and_no_parameters(device, make_task) -> None:
    """Derivation: the held-out quarter of 40 examples is 10, so that the accuracy is a tenth; nothing is trained."""
    draft = device.perform(make_task(train=False, evaluate=True))
    update = update_of(draft)
    assert (update.params, update.weight, update.num_examples, update.loss) == (None, 0.0, 0, None)
    assert set(update.metrics) == {"eval_accuracy", "eval_loss", "eval_examples"}
    assert update.metrics["eval_examples"] == 10.0
    assert update.metrics["eval_accuracy"] * 10 == pytest.approx(round(update.metrics["eval_accuracy"] * 10))
    assert update.cost.bytes_up == 0
    assert [path.name for path in draft.iterdir()] == [outbox.UPDATE]


def test_evaluation_is_of_what_came_not_of_what_training_made(device, make_task) -> None:
    """The figures are the same with and without training, and after other trainings on the same bench."""
    alone = update_of(device.perform(make_task(train=False, evaluate=True))).metrics
    device.perform(make_task(round=2))
    assert update_of(device.perform(make_task(round=3, evaluate=True))).metrics == alone


def test_a_device_that_holds_nothing_back_evaluates_nothing(device, make_task, examples) -> None:
    everything = msgspec.structs.replace(examples, holdout=0.0)
    update = update_of(device.perform(make_task(evaluate=True), data=everything))
    assert update.metrics == {}
    assert update.num_examples == 40


def test_validation_is_apart_from_training_and_from_evaluation(device, examples) -> None:
    """Of 40: 10 held out, of the 30 left 6 to validate with; every example is in one part, and what is held out stays
    what it is without."""
    parts = device.workspace.data(msgspec.structs.replace(examples, validation=0.2))
    assert [len(part) for part in parts] == [24, 10, 6]
    before = device.workspace.data(examples)
    assert [len(part) for part in before] == [30, 10, 0]
    assert torch.equal(before[1].inputs, parts[1].inputs)
    rows = [tuple(row.tolist()) for part in parts for row in part.inputs.flatten(1)]
    assert sorted(rows) == sorted(tuple(row.tolist()) for part in before for row in part.inputs.flatten(1))
    told = Assignment(seed=1, hyper=Hyper())
    batches = device.workspace.batches(msgspec.structs.replace(examples, validation=0.2), told, lambda: False)
    assert batches.num_examples == 24
    assert torch.equal(batches.validation[0], parts[2].inputs)
    assert torch.equal(batches.validation[1], parts[2].labels)


def test_a_task_of_no_epochs_moves_nothing_and_has_no_loss(device, make_task) -> None:
    draft = device.perform(make_task(assignment=Assignment(seed=1, hyper=Hyper(local_epochs=0))))
    assert not any(leaf.any() for leaf in moved(draft).values())
    assert update_of(draft).loss is None
    assert update_of(draft).num_examples == 30


def test_examples_and_network_are_kept_between_tasks(device, make_task, examples) -> None:
    """The file is read once: a second task works after it has rotted; another spec replaces what was kept."""
    device.perform(make_task())
    network = device.workspace.latest["network"][1][0]
    path = Path(examples.path)
    whole = path.read_bytes()
    try:
        path.write_bytes(b"")
        device.perform(make_task(round=2))
    finally:
        path.write_bytes(whole)
    assert device.workspace.latest["network"][1][0] is network
    device.perform(make_task(round=3), data=msgspec.structs.replace(examples, holdout=0.5))
    train, evaluation, _ = device.workspace.latest["examples"][1]
    assert len(train) == len(evaluation)


def test_a_method_without_state_leaves_no_state_file(device, make_task) -> None:
    assert not (device.perform(make_task()) / outbox.STATE).exists()


def test_state_and_codec_memory_outlive_a_task_and_a_restart(device, make_task) -> None:
    """FedAvg and the dense codec hand both on untouched: two tasks, each promoted, the second after a restart."""
    tree = {
        "algorithm/mask": torch.tensor([True, False]),
        "codec/1.bias": torch.arange(8.0),
        "codec/a/b": torch.ones(1),
    }
    kept = State(tree, {"last_loss": 0.25, "rounds": 3})
    file.save(device.folder / "state" / "trial", kept)
    for number in (1, 2):
        draft = device.perform(make_task(round=number))
        (device.folder / "state" / "trial").write_bytes(b"the old one must not be needed again")
        outbox.commit(draft)
        device.outbox = Outbox(device.folder / "outbox", device.folder / "state")
        device.workspace = Workspace()
        found = file.load(device.folder / "state" / "trial")
        assert found.facts == kept.facts
        assert found.tree.keys() == tree.keys()
        assert all(torch.equal(found.tree[key], leaf) for key, leaf in tree.items())


def test_another_run_does_not_see_the_state(device, make_task) -> None:
    file.save(device.folder / "state" / "trial", State({}, {"rounds": 3}))
    assert not (device.perform(make_task(run="other")) / outbox.STATE).exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced"])
def test_a_corrupt_state_is_set_aside_and_the_next_task_starts_afresh(device, make_task, damage: str) -> None:
    """One failed task that names the file; the bad bytes are kept for inspection, and are in nobody's way."""
    path = device.folder / "state" / "trial"
    file.save(path, State({"algorithm/mask": torch.ones(100)}, {"rounds": 3}))
    whole = path.read_bytes()
    bad = {
        "cut": whole[:-7],
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "emptied": b"",
        "replaced": b"\x00" * len(whole),
    }[damage]
    path.write_bytes(bad)
    with pytest.raises(TaskFailed, match=naming(path, "trial.corrupt-1")):
        device.perform(make_task())
    assert not path.exists()
    assert path.with_name("trial.corrupt-1").read_bytes() == bad
    assert update_of(device.perform(make_task(round=2))).num_examples == 30
