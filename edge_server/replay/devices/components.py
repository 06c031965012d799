"""Compute, link and power models that a device's behaviour is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from edge_server.replay.devices.behaviour import LinkOfRound, Radio, Work, unknown_radio
from edge_server.replay.devices.flow import Flow


class ComputeCost(NamedTuple):
    """Time and cycles of a task.

    Attributes:
        cycles: Sum over all cores; None if unknown.
        hertz: Mean clock; None if unknown.
    """

    seconds: float
    cycles: float | None = None
    hertz: float | None = None
    cores: float = 1.0


@dataclass(frozen=True)
class ComputeModel:
    """Compute speed of a device.

    Attributes:
        takes: (work, virtual second of its start) -> cost.
        source: Provenance of the figures; empty for a plan that states only seconds.
        least: Candidate costs of work at any time, among them the fastest and the most economical.
    """

    takes: Callable[[Work, float], ComputeCost]
    source: str
    least: Callable[[Work], list[ComputeCost]]


@dataclass(frozen=True)
class LinkModel:
    """Link of a device; attributes as in `Behaviour`.

    Attributes:
        source: Provenance of the figures.
        tx_w: Transmit power in watts; None if unknown.
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
    """Return None: the power is unknown."""
    return None


@dataclass(frozen=True)
class EnergyModel:
    """Power of a device.

    Attributes:
        charge: Cost of computing -> joules of the device, idle power included.
        idle_w: Idle power in watts; None if unknown.
        radio: Joules of a transfer.
        source: Provenance of the figures.
    """

    charge: Charge = unknown_power
    idle_w: float | None = None
    radio: Radio = unknown_radio
    source: str = ""


def steady_radio(tx_w: float | None, rx_w: float | None) -> Radio:
    """Return a radio of constant transmit and receive power, in watts; None if unknown."""

    def radio(way: str, t0: float, t1: float) -> float | None:
        watts = tx_w if way == "up" else rx_w
        return None if watts is None else watts * (t1 - t0)

    return radio
