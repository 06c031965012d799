"""Comparison of the inputs that devices prepare with those of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.protocol.inputs import Inputs, differences
from shared.protocol.messages import Status


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run.

    Attributes:
        inputs: What is known of them.
        origin: Who says so, for people.
        is_recorded: Whether a server that goes on with the run finds them without asking the devices.
    """

    inputs: Inputs
    origin: str
    is_recorded: bool = True

    def refusal(self, device: str, told: Inputs | None) -> str:
        """Return why a device takes no part, with both kinds of inputs; empty where it may."""
        found = list(differences(told, self.inputs)) if told else []
        if not found:
            return ""
        theirs, ours = ("; ".join(part) for part in zip(*found, strict=True))
        return (
            f"device {device} takes no part, its inputs mean something else: it has {theirs}; {self.origin} {ours}. "
            "Set the same in [data] of the plan and of each device's file"
        )


def agreed_inputs(known: RunInputs | None, statuses: Mapping[str, Status], devices: Iterable[str]) -> RunInputs | None:
    """Return the inputs that devices agree on with what is known already; None where nobody tells any.

    What the plan leaves open, such as the order of a table's columns, is as the first device has it.

    Args:
        known: From the plan, or a record; None where neither says anything.
        statuses: What each device last told of itself.
        devices: Those that take part.

    Raises:
        ConfigError: Two of them differ; the message has both.
    """
    for device in sorted(devices):
        told = statuses[device].inputs
        if told is None:
            continue
        if known is None:
            known = RunInputs(told, f"device {device} has", is_recorded=False)
        if refusal := known.refusal(device, told):
            raise ConfigError(refusal.replace(" takes no part", ": the run does not begin", 1))
        if (filled := known.inputs.filled(told)) != known.inputs:
            known = RunInputs(filled, f"the plan and device {device} have", is_recorded=False)
    return known
