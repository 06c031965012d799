"""What a device evaluates whose method gives it a model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from device_agent.trainer.task_files import read_state
from device_agent.trainer.workspace import Workspace
from shared.algorithms.personal_model import MODEL_DRAW, MODEL_SEED
from shared.models.build import DRAW, build_initial
from shared.models.evaluate import score
from shared.protocol.messages import Assignment, Hyper, Spec
from shared.tensors.tree import State, Tree
from tests.device_agent.agent_side import update_of

SPEC = Spec(name="mlp", options={"features": 4, "hidden": 8, "classes": 2})
TOLD = Assignment(
    seed=3, hyper=Hyper(batch_size=8, learning_rate=0.5, local_epochs=3), values={MODEL_SEED: 7, MODEL_DRAW: DRAW}
)


@pytest.fixture
def personal(make_task, device):
    """Return a task of a method of which nothing travels, so that what is evaluated can only be the device's own."""
    device.sent = device.params({})
    return lambda **fields: make_task(algorithm=Spec(name="local_only"), assignment=TOLD, **fields)


def expected(device, tree: Tree) -> dict[str, float]:
    model, held = build_initial(SPEC, 0), device.workspace.latest["examples"][1][1]
    found = score(model.layers.eval(), tree, held)
    return {"eval_accuracy": found.accuracy, "eval_loss": found.loss, "eval_examples": float(len(held))}


def kept(draft: Path) -> State:
    return read_state(draft / outbox.STATE)[0]


def test_a_personal_model_is_tried_as_training_left_it(device, personal):
    draft = device.perform(personal(evaluate=True), params=device.sent)
    found = update_of(draft).metrics
    assert found == pytest.approx(expected(device, kept(draft).tree))
    assert found != pytest.approx(expected(device, build_initial(SPEC, 7).tree()))


def test_evaluation_alone_is_of_the_model_on_disk(device, personal):
    """That of the last round, also after a restart, and again; nothing is trained, the file stays as it is."""
    draft = device.perform(personal(evaluate=True), params=device.sent)
    after = update_of(draft).metrics
    outbox.commit(draft)
    for number in (8, 9):
        device.outbox = Outbox(device.folder / "outbox", device.folder / "state")
        device.workspace = Workspace()
        before = (device.folder / "state" / "trial").read_bytes()
        alone = device.perform(personal(round=number, train=False, evaluate=True), params=device.sent)
        assert update_of(alone).metrics == after
        assert not (alone / outbox.STATE).exists()
        assert (device.folder / "state" / "trial").read_bytes() == before


def test_a_device_that_never_took_part_tries_what_all_begin_with(device, personal):
    found = update_of(device.perform(personal(train=False, evaluate=True), params=device.sent)).metrics
    assert found == pytest.approx(expected(device, build_initial(SPEC, 7).tree()))


def test_the_model_goes_on_from_round_to_round(device, personal):
    """Two rounds are not one: the second begins with what the first left."""
    outbox.commit(device.perform(personal(), params=device.sent))
    device.outbox = Outbox(device.folder / "outbox", device.folder / "state")
    first = read_state(device.folder / "state" / "trial")[0].tree
    second = kept(device.perform(personal(round=2), params=device.sent)).tree
    assert not any(torch.equal(first[key], second[key]) for key in first)
