"""The textbook's devices for a plan, and how far a replay's record is from what the textbook says."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from edge_server.costs import by_round
from edge_server.replay.behaviour import Work
from edge_server.replay.behaviours import behaviour
from edge_server.store.base import AnyRecord, closed_rounds
from edge_server.trial.plan import devices, share
from shared import payload
from shared.codecs.dense import dense
from shared.data.shelf import Shelf
from shared.measures import Cost
from shared.models.init import initial
from tests.edge_server.harness import write_examples
from tests.edge_server.replay.textbook_replay import Device, simulate
from tests.edge_server.textbook import make_plan

FIGURES = ("download_s", "compute_s", "upload_s", "download_joules", "compute_joules", "upload_joules", "cycles")
COMPUTE = 'compute = { kind = "ranges", hertz = [1e9, 2e9], cycles_per_step = 2e9 }'
POWER = 'power = { kind = "cycles", kappa = 1e-28, idle_w = 0.5, tx_w = [0.1, 1.0], rx_w = 0.3 }'
GIVEN = 'link = { kind = "given", up_mbit_s = 0.1, down_mbit_s = 0.3, delay_s = 0.02 }'


def plan_of(folder: Path, keys: str, *, rounds: int = 6, hidden: int = 64, count: int = 10, size: int = 3):
    """Return a plan of so many devices, some of which take part in each round."""
    sections = {
        "cohort": f"size = {size}",
        "round": "deadline_s = 9000.0",
        "evaluation": "every = 0",
        "partition": 'kind = "even"',
        "model": f'name = "mlp"\noptions = {{ features = 8, hidden = {hidden}, classes = 3 }}',
    }
    plan = make_plan(folder, rounds=rounds, more=f'[[device]]\nname = "pi"\ncount = {count}\n{keys}', **sections)
    if count > 45:  # a share for each
        write_examples(folder, 2 * count)
    return plan


def fleet_of(plan) -> list[Device]:
    """Return the textbook's devices, with links and power as the plan says."""
    fleet, shelf, found = devices(plan), Shelf(), []
    for index, device in enumerate(fleet):
        behaves = behaviour(device, index, plan.seed)
        examples = shelf.count(share(plan, fleet, index))
        steps = plan.hyper.local_epochs * -(-examples // plan.hyper.batch_size)
        effort = behaves.compute(Work(steps, examples=0, weights=0, flops=0, run="", round=1, train=True), 0.0)
        computing = Cost(
            compute_s=effort.seconds,
            cycles=effort.cycles,
            compute_joules=effort.joules,
            idle_w=effort.idle_w,
            provenance=effort.provenance,
        )
        made = Device(device.name, behaves.up.when, behaves.down.when, behaves.delay_s, examples, computing)
        made.radio, made.known = behaves.radio, behaves.provenance
        if behaves.of_round:
            made.of_round = lambda number, of=behaves.of_round: tuple(flow.when for flow in of(number))
        found.append(made)
    return found


def packed(tree: dict[str, Tensor]) -> int:
    """Return the bytes of a payload."""
    return sum(part.nbytes for part in payload.pack(dense().encode(tree, None)[0]))


def expected(plan, run: str, fleet: list[Device]) -> list[tuple[float, dict[str, Cost]]]:
    """Return what the textbook says of every round."""
    tree = initial(plan.model, plan.seed).tree()
    return simulate(plan, run, fleet, (packed(dict(sorted(tree.items()))), packed(tree)))  # parameters go by name


def furthest(records: list[AnyRecord], rounds: list[tuple[float, dict[str, Cost]]]) -> float:
    """Return the largest difference between a record and the textbook, as a share; infinite where bytes differ."""
    costs, worst = by_round(records), 0.0
    for closed, (seconds, spent) in zip(closed_rounds(records), rounds, strict=True):
        worst = max(worst, abs(closed.seconds / seconds - 1))
        for name, cost in spent.items():
            found = costs[closed.round][name]
            same = (closed.bytes_down[name], closed.bytes_up[name]) == (cost.bytes_down, cost.bytes_up)
            worst = max(worst, *(_apart(getattr(found, figure), getattr(cost, figure)) for figure in FIGURES))
            if not same or found.provenance != cost.provenance or found.idle_w != cost.idle_w:
                return float("inf")
        if set(closed.arrived) != set(spent):
            return float("inf")
    return worst


def _apart(one: float | None, other: float | None) -> float:
    """Return how far two figures are apart; one that is not known is far from any that is."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(abs(other), 1e-9)
