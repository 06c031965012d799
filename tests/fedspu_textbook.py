"""FedSPU as its paper has it, in one loop and plain torch with masks, from what a run's record says was assigned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.plan.plan import Plan, devices, share
from shared.data.examples import Examples, split_holdout
from shared.data.load import load
from shared.models.build import initial
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import draw_neurons


def trained_on(plan: Plan) -> dict[str, Examples]:
    """Return what each device trains on: what is left after evaluation and validation."""
    fleet = devices(plan)
    shares = {}
    for index, device in enumerate(fleet):
        rest, _ = split_holdout(load(share(plan, fleet, index)), plan.data.holdout, 0)
        shares[device.name], _ = split_holdout(rest, plan.data.validation, 1)
    return shares


def textbook(plan: Plan, records: Iterable[AnyRecord]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the server's model and the devices' own ones after all rounds, in which all devices took part."""
    features, hidden, classes = (plan.model.options[key] for key in ("features", "hidden", "classes"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    model.load_state_dict(initial(plan.model, plan.seed).tree())
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
