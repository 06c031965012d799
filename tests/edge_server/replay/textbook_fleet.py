"""Textbook devices from a plan's tables; distance of a record from them.

Nothing here is the replay's own: draws, Shannon's rate, traces and joules are written down once more, from the plan's
documentation. Sizes of messages are those of the protocol's encoder, with the figures of the textbook in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import torch
import xxhash

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, closed_rounds
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan, devices
from shared.codecs import CODECS
from shared.codecs.base import Codec
from shared.codecs.dense import dense
from shared.data.cache import DataCache
from shared.models.build import build_initial
from shared.protocol import payload, wire
from shared.protocol.measurements import Cost, Provenance, TaskCost
from shared.protocol.messages import Ack, Assignment, Message, Report, Task, Transfer, Update, Want, derive_seed
from shared.registry import build
from shared.tensors.tree import Tree
from tests.edge_server.harness import write_examples
from tests.edge_server.replay.textbook_replay import Device, simulate
from tests.edge_server.textbook import make_plan

FIGURES = ("download_s", "compute_s", "upload_s", "download_joules", "compute_joules", "upload_joules", "cycles")
COMPUTE = 'compute = { kind = "ranges", hertz = [1e9, 2e9], cycles_per_step = 2e9 }'
POWER = 'power = { kind = "cycles", kappa = 1e-28, idle_w = 0.5, tx_w = [0.1, 1.0], rx_w = 0.3 }'
GIVEN = 'link = { kind = "given", up_mbit_s = 0.1, down_mbit_s = 0.3, delay_s = 0.02 }'
DIGEST, BLOCK, LARGEST = bytes(16), 1024, 256 * 1024


def plan_of(folder: Path, keys: str, *, rounds: int = 6, hidden: int = 64, count: int = 10, size: int = 3, **more: str):
    """Return a plan of so many devices, some of which take part in each round."""
    sections = {
        "cohort": f"size = {size}",
        "round": "deadline_s = 9000.0",
        "evaluation": "every = 0",
        "partition": 'kind = "even"',
        "model": f'name = "mlp"\noptions = {{ features = 8, hidden = {hidden}, classes = 3 }}',
    }
    fleet = f'[[device]]\nname = "pi"\ncount = {count}\n{keys}'
    plan = make_plan(folder, rounds=rounds, more=fleet, **sections | more)
    if count > 45:  # a share for each
        write_examples(folder, 2 * count)
    return plan


def drawn(span: float | tuple[float, float], *keys: object) -> float:
    """Draw uniformly from a range: the upper 53 bits of a hash of the keys."""
    low, high = span if isinstance(span, tuple) else (span, span)
    return low + (high - low) * uniform(*keys)


def uniform(*keys: object) -> float:
    """Draw from [0, 1)."""
    return (xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 11) / 2**53


def watts(dbm: float) -> float:
    """Return the power of a level."""
    return 10 ** (dbm / 10 - 3)


def again(every: str | float, t: float, number: int) -> tuple[object, float]:
    """Return the key of a draw that holds at a second, and until when it holds."""
    if isinstance(every, str):
        return (number if every == "round" else ""), math.inf
    block = math.floor(t / every)
    return block, max((block + 1) * every, math.nextafter(t, math.inf))


def rate_of(link, keys: tuple[object, ...]) -> Callable[[str, float, int], tuple[float, float]]:
    """Return (way, second, round) -> bit/s and until when, for what a plan says of a link."""

    def given(way: str, _t: float, _number: int) -> tuple[float, float]:
        return 1e6 * getattr(link, f"{way}_mbit_s"), math.inf

    def ranges(way: str, t: float, number: int) -> tuple[float, float]:
        draw, end = again(link.again, t, number)
        return 1e6 * drawn(getattr(link, f"{way}_mbit_s"), *keys, way, draw), end

    def wireless(way: str, t: float, number: int) -> tuple[float, float]:
        draw, end = again(link.again, t, number)
        bandwidth, metres = (drawn(getattr(link, name), *keys, name) for name in ("bandwidth_hz", "distance_m"))
        path = 10 ** (-(128.1 + 37.6 * math.log10(metres / 1000)) / 10)
        fading = -math.log(1 - uniform(*keys, "gain", draw)) if link.fading == "rayleigh" else link.gain
        sent = watts(drawn(link.tx_dbm, *keys, "tx_dbm") if way == "up" else link.server_dbm)
        return bandwidth * math.log2(1 + path * fading * sent / (watts(link.noise_dbm_hz) * bandwidth)), end

    return {"given": given, "ranges": ranges, "wireless": wireless}.get(kind(link), given)


def kind(table) -> str:
    """Return the kind of a table."""
    return type(table).__struct_config__.tag


def fleet_of(plan: Plan) -> list[Device]:
    """Return the textbook's devices; those with traces lack what only the trace can say."""
    fleet, shelf = devices(plan), DataCache()
    return [_device(plan, device, shelf.count(device_data(plan, fleet, index))) for index, device in enumerate(fleet)]


def _device(plan: Plan, device, examples: int) -> Device:
    keys = (plan.seed, device.name)
    steps = plan.hyper.local_epochs * math.ceil(examples / plan.hyper.batch_size)
    at_first = {"free": {"up": 0.0, "down": 0.0}, "since": 0.0, "before": 0, "number": 0, "rests_at": -1.0}
    made = Device(name=device.name, examples=examples, delay_s=device.link.delay_s, **at_first)
    made.rate, link = rate_of(device.link, keys), f"plan, link {kind(device.link)}"
    computing, power = f"plan, compute {kind(device.compute)}", f"plan, power {kind(device.power)}"
    made.known = {"download_s": link, "upload_s": link, "compute_s": computing, "cycles": computing}
    made.known |= dict.fromkeys(("download_joules", "compute_joules", "upload_joules"), power)
    made.energy = _energy(device, keys)

    def task(number: int) -> dict[str, float]:
        if kind(device.compute) == "given":
            return {"compute_s": device.compute.seconds, **made.energy("compute", device.compute.seconds, 0.0, 0.0)}
        draw, _ = again(device.compute.again, 0.0, number)
        count, hertz = steps * device.compute.cycles_per_step, drawn(device.compute.hertz, *keys, "hertz", draw)
        return {"compute_s": count / hertz, "cycles": count, **made.energy("compute", count / hertz, count, hertz)}

    def radio(way: str, seconds: float) -> dict[str, float]:
        load = f"{way}load"
        return {f"{load}_s": seconds, **made.energy(load, seconds, 0.0, 0.0)}

    made.task, made.radio = task, radio
    return made


def _energy(device, keys: tuple[object, ...]) -> Callable[[str, float, float, float], dict[str, float]]:
    """Return (what, seconds, cycles, hertz) -> its joules and the idle power, as far as a plan's table says."""
    power = device.power
    if kind(power) == "given":
        drawn_w = {"compute": power.busy_w, "download": power.rx_w, "upload": power.tx_w}
        return lambda what, seconds, *_: {f"{what}_joules": drawn_w[what] * seconds, "idle_w": power.idle_w}

    def joules(what: str, seconds: float, count: float, hertz: float) -> dict[str, float]:
        if what == "compute":
            spent = power.kappa * count * hertz**2
        elif what == "download":
            spent = power.rx_w * seconds
        elif power.tx_w is None:
            spent = watts(drawn(device.link.tx_dbm, *keys, "tx_dbm")) * seconds
        else:
            spent = drawn(power.tx_w, *keys, "tx_w") * seconds
        return {f"{what}_joules": spent + power.idle_w * seconds, "idle_w": power.idle_w}

    return joules


class Words:
    """Bytes of every message of a run, and of parameters and updates."""

    def __init__(self, plan: Plan, run: str) -> None:
        self.plan, self.run = plan, run
        tree = build_initial(plan.model, plan.seed).tree()
        self.down = _packed(dense(), dict(sorted(tree.items())))  # parameters go by name
        numbers = torch.Generator().manual_seed(1)
        scattered = {
            key: torch.randn(leaf.shape, generator=numbers) for key, leaf in tree.items()
        }  # as large changes are in an update
        self.up = _packed(build(CODECS, plan.codec, "codec"), scattered)
        self.largest = LARGEST if plan.cohort.size != 1 else BLOCK * 16

    def want(self, frame: int, start: int, stop: int) -> int:
        """Return the bytes that ask for a part of a payload."""
        return _size(Want(digest=DIGEST, frame_bytes=frame, ranges=[(start // BLOCK, -(-stop // BLOCK))]))

    def birth(self, one: Device) -> int:
        """Return the bytes in which a device says that it is here."""
        return _size(Report(device=one.name, at=1.0))

    def task(self, one: Device, number: int) -> int:
        """Return the bytes that tell a device what to do."""
        plan, told = self.plan, Assignment(seed=derive_seed(self.plan.seed, number, one.name), hyper=self.plan.hyper)
        spec = {"algorithm": plan.algorithm, "model": plan.model, "codec": plan.codec, "assignment": told}
        limits = {"shared": plan.cohort.size != 1, "measure_s": 0.0, "deadline_s": plan.round.deadline_s}
        params = Transfer(digest=DIGEST, size=self.down, frame_bytes=LARGEST)
        return _size(Task(run=self.run, round=number, device=one.name, params=params, **spec, **limits))

    def update(self, one: Device, number: int, spent: dict[str, float]) -> int:
        """Return the bytes that offer an update."""
        about = {"weight": 1.0, "num_examples": one.examples, "loss": 1.0, "start": DIGEST}
        params = Transfer(digest=DIGEST, size=self.up, frame_bytes=LARGEST)
        cost = cost_of(one, spent | {"bytes_up": self.up})
        return _size(Update(run=self.run, round=number, device=one.name, params=params, cost=cost, **about))

    def ack(self, one: Device, number: int) -> int:
        """Return the bytes that settle an update."""
        return _size(Ack(run=self.run, round=number, device=one.name, start=DIGEST, verdict="accepted"))

    def report(self, one: Device, number: int, spent: dict[str, float]) -> int:
        """Return the bytes that tell what a task cost."""
        told = TaskCost(run=self.run, round=number, cost=cost_of(one, spent))
        return _size(Report(device=one.name, at=1.0, spent=told))


def cost_of(one: Device, spent: dict[str, float]) -> Cost:
    """Return figures as a message has them, with their origin."""
    known = {name: Provenance(source=one.known[name], quality="modelled") for name in spent if name in one.known}
    return Cost(**spent, provenance=known)


def expected(plan: Plan, run: str, fleet: list[Device]) -> list[tuple[float, dict[str, Cost]]]:
    """Return what the textbook says of every round."""
    names, by_name = sorted(one.name for one in fleet), {one.name: one for one in fleet}

    @cache
    def chosen(number: int) -> frozenset[str]:
        drawn_names = Random(f"{plan.seed}/{number}").sample(names, plan.cohort.size) if plan.cohort.size else names
        return frozenset(drawn_names)

    rounds = simulate(fleet, chosen, plan.rounds, plan.round.deadline_s, Words(plan, run))
    return [(s, {name: cost_of(by_name[name], spent) for name, spent in costs.items()}) for s, costs in rounds]


def furthest(records: list[AnyRecord], rounds: list[tuple[float, dict[str, Cost]]]) -> float:
    """Return the largest difference between a record and the textbook, as a share; infinite where bytes differ."""
    costs, worst = costs_by_round(records), 0.0
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


def _size(message: Message) -> int:
    return len(wire.encode(message))


def _packed(codec: Codec, tree: Tree) -> int:
    return sum(part.nbytes for part in payload.pack(codec.encode(tree, None)[0]))
