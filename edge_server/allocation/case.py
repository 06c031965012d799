"""What one round's decision is made from, and nothing else: the same case gives the same decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.journal.decision import Decision, Figure


@dataclass(frozen=True)
class Case:
    """One round, for all devices of its cohort.

    Attributes:
        devices: By name; one that is named twice is one.
        limits: What holds for all of them: seconds, joules, sizes of the model.
        figures: Of each device, by name.
        ladder: Ratios to choose from, each with the bytes of an update.
        places: Of each device in the order in which the run has met them.
    """

    devices: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)
    ladder: tuple[tuple[float, int], ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the devices, each once."""
        return list(dict.fromkeys(self.devices))

    def column(self, name: str, otherwise: float) -> list[float]:
        """Return one figure of every device; `otherwise` where it is not known."""
        found = [self.figures.get(device, {}).get(name) for device in self.names]
        return [figure.value if figure else otherwise for figure in found]

    def known(self, device: str) -> dict[str, Figure]:
        """Return what the record keeps of a device."""
        return dict(self.figures.get(device, {}))


def of(decision: Decision) -> Case:
    """Return the case that a recorded decision was made from."""
    return Case(
        devices=tuple(decision.devices),
        limits=decision.limits,
        figures={device: given.figures for device, given in decision.devices.items()},
        ladder=tuple(decision.ladder),
    )
