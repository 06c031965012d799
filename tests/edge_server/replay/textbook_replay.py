"""FedAvg's virtual seconds, joules and bytes as a textbook has them: every message of a round on its device's link.

For parameters that fit into one frame, and devices that ask for them within a second of one another: the server gives
up on none of them by then. An update travels in the frames that the protocol's own rules of pace ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from edge_server.cohort import select
from shared import wire
from shared.algorithms.base import mix
from shared.chunks import FRAME_BYTES, HEADER_BYTES, Assembly, Frame, pieces
from shared.measures import Cost, Provenance, Spent
from shared.messages import BLOCK_BYTES, Ack, Assignment, Message, Report, Task, Transfer, Update, Want
from shared.pace import Pace

SMALL_BYTES, PAUSE_S, DIGEST = 16 * 1024, 1.0, bytes(16)
"""What a transfer to one device begins with; seconds between two reports of a device; any digest is as long."""

Passes = Callable[[float, float], float]
"""(second, bits) -> the second at which they have passed."""


@dataclass
class Device:
    """One device: how bits pass each way; what a task costs; where its ways stand."""

    name: str
    up: Passes
    down: Passes
    delay_s: float
    examples: int
    computing: Cost
    radio: Callable[[str, float, float], float | None] = lambda *_: None
    of_round: Callable[[int], tuple[Passes, Passes]] | None = None
    known: dict[str, Provenance] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)
    tuned: tuple[float, Passes, Passes] | None = None
    rests_at: float = -1.0
    reported_at: float = 0.0

    def tune(self, now: float, number: int) -> None:
        """Have another link from now on, where it is drawn by the round."""
        self.tuned = (now, *self.of_round(number)) if self.of_round else self.tuned

    def wake(self, now: float) -> float:
        """Come to life if it rested, and say so."""
        if now >= self.rests_at:
            self.free = {"up": 0.0, "down": 0.0}
            self.reported_at = self.send("up", now, Report(device=self.name, at=now))
        return now

    def send(self, way: str, now: float, message: Message | int) -> float:
        """Return when what is sent now arrives: a message, or so many bytes."""
        size = message if isinstance(message, int) else len(wire.encode(message))
        _, up, down = self.tuned if self.tuned and now >= self.tuned[0] else (0.0, self.up, self.down)
        self.free[way] = (up if way == "up" else down)(max(self.free[way], now), 8.0 * size)
        return self.free[way] + self.delay_s

    def spent(self, params: Transfer, result: Transfer, told: float, here: float) -> Cost:
        """Return what a task costs up to the end of its computing."""
        sizes = {"bytes_down": HEADER_BYTES + params.size, "bytes_up": result.size}
        return self.charged(msgspec.structs.replace(self.computing, **sizes), "download", told, here)

    def charged(self, cost: Cost, load: str, start: float, stop: float) -> Cost:
        """Return a cost with the seconds and joules of a transfer."""
        joules, names = self.radio("up" if load == "upload" else "down", start, stop), [f"{load}_s"]
        names += [f"{load}_joules"] * (joules is not None)
        found = {name: self.known[name] for name in names if name in self.known}
        figures = {f"{load}_s": stop - start, f"{load}_joules": joules, "provenance": cost.provenance | found}
        return msgspec.structs.replace(cost, **figures)


def wanted(transfer: Transfer, frame_bytes: int) -> Want:
    """Return the word that asks for all of a transfer."""
    return Want(digest=DIGEST, frame_bytes=frame_bytes, ranges=[(0, transfer.blocks)])


def simulate(plan, run: str, fleet: list[Device], sizes: tuple[int, int]) -> list[tuple[float, dict[str, Cost]]]:
    """Return every round's seconds, and what it cost each device; sizes are those of parameters and of an update."""
    now, rounds, by_name = 0.0, [], {device.name: device for device in fleet}
    params, result = (Transfer(digest=DIGEST, size=size, frame_bytes=FRAME_BYTES) for size in sizes)
    ended: dict[str, tuple[float, float, Cost]] = {}
    for number in range(1, plan.rounds + 1):
        chosen = select(list(by_name), size=plan.cohort.size, seed=plan.seed, number=number)
        for device in map(by_name.__getitem__, chosen):
            device.tune(now, number)
        for name, (_, heard, cost) in ended.items():
            report(by_name[name], run, number - 1, heard, cost)
        told, asked = {}, {}
        for name in chosen:
            told[name] = by_name[name].send("down", by_name[name].wake(now), task(plan, run, number, name, params))
            want = wanted(params, FRAME_BYTES if len(chosen) > 1 else SMALL_BYTES)
            asked[name] = by_name[name].send("up", told[name], want)
        sent = max(asked.values())
        assert sent - min(asked.values()) < 1.0, "the textbook knows no device that is served alone"
        ended = {}
        for name in chosen:
            here = by_name[name].send("down", sent, HEADER_BYTES + params.size)
            cost = by_name[name].spent(params, result, told[name], here)
            ended[name] = delivered(by_name[name], run, number, result, here + cost.compute_s, cost)
        last = max(arrived for arrived, _, _ in ended.values())
        rounds.append((last - now, {name: cost for name, (_, _, cost) in ended.items()}))
        now = last
    return rounds


def task(plan, run: str, number: int, name: str, params: Transfer) -> Task:
    """Return what the server tells a device to do."""
    assignment = Assignment(seed=mix(plan.seed, number, name), hyper=plan.hyper)
    spec = {"algorithm": plan.algorithm, "model": plan.model, "codec": plan.codec, "assignment": assignment}
    limits = {"shared": plan.cohort.size > 1, "measure_s": 0.0, "deadline_s": plan.round.deadline_s}
    return Task(run=run, round=number, device=name, params=params, **spec, **limits)


def delivered(device: Device, run: str, number: int, result: Transfer, now: float, cost: Cost):
    """Return when an update was there, when its device heard so, and what had been spent by then."""
    trained = {"start": DIGEST, "weight": 1.0, "num_examples": device.examples, "loss": 1.0, "cost": cost}
    update = Update(run=run, round=number, device=device.name, params=result, **trained)
    begun, arrived, carried = uploaded(device, result, device.send("up", now, update))
    ack = Ack(run=run, round=number, device=device.name, start=DIGEST, verdict="accepted")
    heard = device.send("down", arrived, ack)
    cost = device.charged(msgspec.structs.replace(cost, bytes_up=carried), "upload", begun, heard)
    return arrived, heard, cost


def uploaded(device: Device, result: Transfer, now: float) -> tuple[float, float, int]:
    """Return when a device was first asked for frames, when the last one was there, and their bytes."""
    assembly, pace, air, begun, carried = Assembly(result), Pace(1.0, now, FRAME_BYTES), deque(), [], 0
    pace.begin_small()
    while not assembly.complete:
        if ranges := assembly.ask(pace.window(2), pace.frame_bytes):
            want = Want(digest=DIGEST, frame_bytes=pace.frame_bytes, ranges=ranges)
            begun.append(device.send("down", now, want))
            for start, stop in pieces(want, result, FRAME_BYTES):
                data = bytes(min(stop * BLOCK_BYTES, result.size) - start * BLOCK_BYTES)
                arrives = device.send("up", begun[-1], HEADER_BYTES + len(data))
                air.append((arrives, Frame(DIGEST, start, result.blocks, memoryview(data))))
                carried += HEADER_BYTES + len(data)
        now, frame = air.popleft()
        pace.heard(now, frame.data.nbytes)
        assembly.accept(frame)
    return begun[0], now, carried


def report(device: Device, run: str, number: int, heard: float, cost: Cost) -> None:
    """Have a device say what a task cost in all; then it rests."""
    spent = Report(device=device.name, at=heard, spent=Spent(run=run, round=number, cost=cost))
    device.reported_at = device.rests_at = device.send("up", max(heard, device.reported_at + PAUSE_S), spent)
