"""FedSPU over memory, mosquitto and embedded broker, against the paper's loop.

Personal models outlive their agents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from device_agent.trainer.task_files import read_state
from edge_server.journal.records import AnyRecord, Evaluated, RoundOpened, UpdateAccepted, closed_rounds
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan, devices
from edge_server.replay.run import replay_plan
from shared.data.examples import Examples, split_holdout
from shared.data.load import load
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import count_parameters, draw_neurons, read_chain
from shared.tensors.tree import Tree
from tests.edge_server.fleets import RUN, Network, Site
from tests.edge_server.harness import write_examples
from tests.edge_server.textbook import NAMES, ROUNDS, SLOW, make_plan, require_equal


def trained_on(plan: Plan) -> dict[str, Examples]:
    """Return what each device trains on: what is left after evaluation and validation."""
    fleet = devices(plan)
    shares = {}
    for index, device in enumerate(fleet):
        rest, _ = split_holdout(load(device_data(plan, fleet, index)), plan.data.holdout, 0)
        shares[device.name], _ = split_holdout(rest, plan.data.validation, 1)
    return shares


def textbook(plan: Plan, records: Iterable[AnyRecord]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the server's model and the devices' own ones after all rounds, in which all devices took part."""
    features, hidden, classes = (plan.model.options[key] for key in ("features", "hidden", "classes"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    model.load_state_dict(build_initial(plan.model, plan.seed).tree())
    server = {key: leaf.clone() for key, leaf in model.state_dict().items()}
    shares = trained_on(plan)
    own = {name: {key: leaf.clone() for key, leaf in server.items()} for name in shares}
    for opened in sorted((one for one in records if isinstance(one, RoundOpened)), key=lambda one: one.round):
        total = {key: torch.zeros_like(leaf) for key, leaf in server.items()}
        weight = {key: torch.zeros_like(leaf) for key, leaf in server.items()}
        for name, told in opened.assignments.items():
            masks = _masks(model, hidden, told)
            merged = {key: torch.where(masks[key], server[key], leaf) for key, leaf in own[name].items()}
            own[name] = _trained(model, merged, masks, shares[name], plan, told)
            for key, leaf in own[name].items():
                total[key] += masks[key] * leaf * len(shares[name])
                weight[key] += masks[key] * len(shares[name])
        server = {key: torch.where(weight[key] > 0, total[key] / weight[key], leaf) for key, leaf in server.items()}
    return server, own


def _masks(model: nn.Module, hidden: int, told: Assignment) -> Mapping[str, Tensor]:
    active = torch.zeros(hidden, dtype=torch.bool)
    active[draw_neurons({"1": hidden}, told.values["keep"], told.seed)["1"]] = True
    like = model.state_dict()
    return {
        "1.weight": active[:, None].expand_as(like["1.weight"]),
        "1.bias": active,
        "3.weight": active[None, :].expand_as(like["3.weight"]),
        "3.bias": torch.ones_like(like["3.bias"], dtype=torch.bool),
    }


def _trained(
    model: nn.Module,
    start: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    examples: Examples,
    plan: Plan,
    told: Assignment,
) -> dict[str, Tensor]:
    """Equations (3) and (4): the gradient is multiplied by the mask at every step."""
    model.load_state_dict(start)
    sgd = torch.optim.SGD(model.parameters(), lr=plan.hyper.learning_rate, momentum=plan.hyper.momentum)
    order = torch.Generator().manual_seed(told.seed)
    for _ in range(plan.hyper.local_epochs):
        for index in torch.randperm(len(examples), generator=order).split(plan.hyper.batch_size):
            sgd.zero_grad()
            functional.cross_entropy(model(examples.inputs[index]), examples.labels[index]).backward()
            for name, leaf in model.named_parameters():
                leaf.grad.mul_(masks[name])
            sgd.step()
    return {key: leaf.clone() for key, leaf in model.state_dict().items()}


numbers = itertools.count()
HEADER_BYTES = 600
"""Of a payload of four leaves and a bitmap: at most so many are header and gaps."""


def make(folder: Path, method: str = "fedspu", options: str = "", **sections: str) -> Plan:
    """Return a plan whose devices have shares 0.25, 0.5 and 1 of the neurons."""
    data = f"{write_examples(folder, 120)}\nholdout = 0.2\nvalidation = 0.2"
    chosen = f'name = "{method}"\noptions = {{ {options} }}'
    optimizer = 'name = "clusters"\noptions = { keep = "0.25,0.5,1" }'
    return make_plan(folder, **({"algorithm": chosen, "data": data, "optimizer": optimizer} | sections))


def own_model(folder: Path, device: str) -> Tree:
    """Return what lies on a device's disk."""
    return read_state(folder / device / "state" / RUN)[0].tree


def require_close(here: Site, tree: Tree, records) -> None:
    """Compare the server's model and every device's own one with the textbook's."""
    server, own = textbook(here.plan, records)
    torch.testing.assert_close(tree, server, rtol=1e-4, atol=1e-5)
    for device in NAMES:
        torch.testing.assert_close(own_model(here.folder, device), own[device], rtol=1e-4, atol=1e-5)


@pytest.fixture
def here(network, tmp_path) -> Site:
    """Return a site of its own on the network, so that tests do not hear one another."""
    return Site(network, make(tmp_path), tmp_path, name=f"spu{next(numbers)}")


def test_devices_of_three_shares_do_what_the_paper_says(here):
    """The server's model and three personal ones; no payload has a byte beyond the formula's but its header."""

    state, records = here.play()
    assert [closed.arrived for closed in closed_rounds(records)] == ROUNDS * [NAMES]
    assert not any(closed.refused for closed in closed_rounds(records))
    require_close(here, state.tree, records)
    layout = read_chain(build_blank(here.plan.model).layers)
    opened = {one.round: one.assignments for one in records if isinstance(one, RoundOpened)}
    assert {told.values["keep"] for told in opened[1].values()} == {0.25, 0.5, 1.0}
    for one in (one for one in records if isinstance(one, UpdateAccepted)):
        told = opened[one.round][one.device]
        active = count_parameters(layout.index(draw_neurons(layout.hidden, told.values["keep"], told.seed)), state.tree)
        assert 0 < one.update.params.size - 4 * active <= HEADER_BYTES


def test_a_device_that_dies_while_it_trains_goes_on_with_its_own_model(here):
    """It is started anew, begins the round again with what it had before, and ends where it would have without."""

    state, records = here.play(lambda: here.serve_while_one_dies("b", 2), compute_s=0.3)
    assert [closed.arrived for closed in closed_rounds(records)] == ROUNDS * [NAMES]
    require_close(here, state.tree, records)


@pytest.mark.parametrize("method", ["fedspu", "random_dropout", "local_only"])
def test_a_replay_is_the_live_run_and_its_record_the_same_for_any_number_of_processes(tmp_path, method):
    """Over slow links, with early stopping and evaluation of personal models on the devices, byte for byte."""
    sections = {"round": "deadline_s = 900.0", "evaluation": "on_device = true", "more": SLOW, "rounds": 4}
    plan = make(tmp_path, method, "early_stopping = true", **sections)
    ends = [
        replay_plan(plan, tmp_path / place / "run", workers=workers) for place, workers in (("one", 1), ("more", 3))
    ]
    require_equal(ends[0][0].tree, ends[1][0].tree)
    assert ends[0][0].facts == ends[1][0].facts
    one, more = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "more"))
    assert one == more
    accepted = [record for record in ends[0][1] if isinstance(record, UpdateAccepted)]
    trained = [record.update for record in accepted if record.round <= plan.rounds]
    assert all({"validation_loss", "stopped"} <= update.metrics.keys() for update in trained)
    tried = [record.by_device for record in ends[0][1] if isinstance(record, Evaluated)]
    assert [[*one] for one in tried] == [[*NAMES]], "at the end, each its own model"
    asked = [record.update for record in accepted if record.round > plan.rounds]
    assert {one.cost.bytes_down < HEADER_BYTES for one in asked} == {method != "random_dropout"}, "which has none"
    require_equal(Site(Network(), plan, tmp_path / "live").play()[0].tree, ends[0][0].tree)


def test_the_bytes_of_dropout_are_those_of_fedspu_at_the_same_neurons(tmp_path):
    sizes = []
    for method in ("fedspu", "random_dropout"):
        folder = tmp_path / method
        folder.mkdir()
        _, records = replay_plan(make(folder, method), folder / "run")
        sizes.append([(one.bytes_up, one.bytes_down) for one in closed_rounds(records)])
    assert sizes[0] == sizes[1]
