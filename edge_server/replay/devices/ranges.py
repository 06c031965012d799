"""Simulated devices with clocks, link rates and transmit power drawn from ranges.

Clocks f are drawn from [lo, hi] Hz, links from [lo, hi] Mbit/s. A task of C cycles at clock f, with an upload of t
seconds at power p, takes the time and energy

    t = C / f,    E = kappa C f^2 + p t

(A. P. Miettinen, J. K. Nurminen, "Energy Efficiency of Mobile Clients in Cloud Computing", HotCloud 2010,
https://www.usenix.org/conference/hotcloud-10/energy-efficiency-mobile-clients-cloud-computing; N. H. Tran et al.,
"Federated Learning over Wireless Networks: Optimization Model Design and Analysis", INFOCOM 2019, eq. 1 to 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_server.plan.links import RangeLink
from edge_server.plan.simulated_devices import Again, Cycles, CyclesPower, RangeCompute, Span, range_ends
from edge_server.replay.devices.behaviour import Work
from edge_server.replay.devices.components import ComputeCost, ComputeModel, EnergyModel, LinkModel, steady_radio
from edge_server.replay.devices.curve import constant
from edge_server.replay.devices.flow import Flow
from edge_server.replay.devices.given import MEGA
from edge_server.replay.devices.random_draws import Blocks, draw_within

FORWARD = 1 / 3
"""Share of an evaluation in a training step's operations."""


# Number of intervals in which the most economical clock of a range is searched, since
# kappa C f^2 + idle_w C / f may have its minimum inside the range.
GRID = 64


def count_cycles(table: Cycles, work: Work) -> float:
    """Return the cycles C of a task; an evaluation only passes forward and has no steps."""
    if table.cycles_per_flop is not None:
        return table.cycles_per_flop * work.flops
    if table.cycles_per_step is not None:
        training = table.cycles_per_step * work.steps
    elif table.cycles_per_weight is not None:
        training = table.cycles_per_weight * work.weights * work.steps
    else:
        assert table.cycles_per_example is not None
        training = table.cycles_per_example * work.examples
    return training * work.share if work.train else training * FORWARD


@dataclass(frozen=True)
class Clock:
    """Clock f of a device.

    Attributes:
        again: When to draw it again: never, every round, or after so many seconds.
        seed: Seed of the draws.
    """

    hertz: Span
    again: Again
    seed: int
    device: str

    def run(self, count: float, number: int, t: float, cores: float = 1.0) -> ComputeCost:
        """Return the cost of `count` cycles, summed over the cores, in round `number` from second `t` on."""
        if isinstance(self.again, str):
            hertz = draw_within(self.hertz, self.seed, self.device, "hertz", number if self.again == "round" else "")
            return ComputeCost(count / cores / hertz, count, hertz, cores)
        flow = draw_blocks(self.hertz, self.again, self.seed, self.device, "hertz")
        seconds = flow.finish_time(t, count / cores) - t
        return ComputeCost(seconds, count, count / cores / seconds if seconds else flow.at(t), cores)

    def least(self, count: float, cores: float = 1.0) -> list[ComputeCost]:
        """Return the costs at all clocks of the range, or at the single clock drawn for the whole run."""
        if self.again == "never":
            return [self.run(count, 0, 0.0, cores)]
        low, high = range_ends(self.hertz)
        clocks = (low + (high - low) * step / GRID for step in range(GRID + 1))
        return [ComputeCost(count / cores / hertz, count, hertz, cores) for hertz in clocks]


def draw_blocks(span: Span, every_s: float, seed: int, device: str, name: str) -> Blocks:
    """Return a figure that is drawn from a range again every `every_s` seconds."""
    return Blocks(lambda block: draw_within(span, seed, device, name, block), every_s, range_ends(span)[1])


def range_compute(table: RangeCompute, seed: int, device: str) -> ComputeModel:
    """Return a compute model with a random clock."""
    clock = Clock(table.hertz, table.again, seed, device)
    return ComputeModel(
        takes=lambda work, t: clock.run(count_cycles(table, work), work.round, t),
        source="plan, compute ranges",
        least=lambda work: clock.least(count_cycles(table, work)),
    )


def range_link(table: RangeLink, seed: int, device: str) -> LinkModel:
    """Return a link model with random rates."""

    def way(name: str, span: Span | None) -> Callable[[int], Flow | None]:
        def of_round(number: int) -> Flow | None:
            if span is None:
                return None
            if not isinstance(table.again, str):
                blocks = draw_blocks(span, table.again, seed, device, name)
                return Blocks(lambda block: MEGA * blocks.draw(block), blocks.every_s, MEGA * blocks.most)
            return constant(MEGA * draw_within(span, seed, device, name, number if table.again == "round" else ""))

        return of_round

    up, down = way("up", table.up_mbit_s), way("down", table.down_mbit_s)
    return LinkModel(
        up=up(0),
        down=down(0),
        delay_s=table.delay_s,
        loss=table.loss,
        of_round=(lambda number: (up(number), down(number))) if table.again == "round" else None,
        source="plan, link ranges",
    )


def cycles_power(table: CyclesPower, tx_w: float | None, seed: int, device: str) -> EnergyModel:
    """Return an energy model based on cycles.

    Args:
        tx_w: Transmit power of the link in watts, used if the table states none.
    """
    power = draw_within(table.tx_w, seed, device, "tx_w") if table.tx_w is not None else tx_w

    def charge(busy: ComputeCost) -> float | None:
        if busy.cycles is None or busy.hertz is None:
            return None
        return table.kappa * busy.cycles * busy.hertz**2 + table.idle_w * busy.seconds

    tx_w, rx_w = (None if radio_w is None else table.idle_w + radio_w for radio_w in (power, table.rx_w))
    return EnergyModel(charge, table.idle_w, steady_radio(tx_w, rx_w), "plan, power cycles")
