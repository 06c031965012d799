"""Compute, link and power models that a device's behaviour is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from edge_server.replay.devices.behaviour import LinkOfRound, Radio, Work, unknown_radio
from edge_server.replay.devices.flow import Flow


class ComputeCost(NamedTuple):
    """What a task takes.

    Attributes:
        seconds: Of virtual time.
        cycles: Of all cores together; None where nobody counts them.
        hertz: Mean clock; None where nobody knows it.
    """

    seconds: float
    cycles: float | None = None
    hertz: float | None = None
    cores: float = 1.0


@dataclass(frozen=True)
class ComputeModel:
    """How fast a device computes.

    Attributes:
        takes: (work, virtual second at which it begins) -> what it takes.
        source: Where that comes from; empty for a plan that only gives seconds.
        least: Everything that work can take, whenever it begins: the quickest and the thriftiest are among it.
    """

    takes: Callable[[Work, float], ComputeCost]
    source: str
    least: Callable[[Work], list[ComputeCost]]


@dataclass(frozen=True)
class LinkModel:
    """How bytes move. The attributes are those of `Behaviour`, with the watts that the device sends with.

    Attributes:
        tx_w: None where the link's source does not say.
    """

    up: Flow | None = None
    down: Flow | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    of_round: LinkOfRound | None = None
    source: str = ""
    tx_w: float | None = None
    warnings: tuple[str, ...] = ()


Charge: TypeAlias = Callable[[ComputeCost], float | None]


def unknown_power(_busy: ComputeCost) -> float | None:
    """Be the power of which nobody knows."""
    return None


@dataclass(frozen=True)
class EnergyModel:
    """What a device draws.

    Attributes:
        charge: What a task takes -> joules of the whole device, idle included.
        idle_w: Watts while it does nothing; None where nobody knows.
        radio: Joules of a transfer.
        source: Where that comes from.
    """

    charge: Charge = unknown_power
    idle_w: float | None = None
    radio: Radio = unknown_radio
    source: str = ""


def steady_radio(tx_w: float | None, rx_w: float | None) -> Radio:
    """Return the radio that draws so many watts for as long as it sends or receives; None: nobody knows."""

    def radio(way: str, t0: float, t1: float) -> float | None:
        watts = tx_w if way == "up" else rx_w
        return None if watts is None else watts * (t1 - t0)

    return radio
