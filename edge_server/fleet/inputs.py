"""Input preparation of a run; rejects devices that prepare inputs differently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from shared.errors import ConfigError
from shared.protocol.inputs import Inputs, differences
from shared.protocol.messages import Status


@dataclass(frozen=True)
class RunInputs:
    """Input preparation of a run.

    Attributes:
        inputs: The known part of it.
        origin: Source of the inputs, as the start of a sentence for people.
        is_recorded: Whether a resumed run finds them without asking the devices.
        is_measured: Whether mean and deviation were measured over all devices, whose own files set none.
    """

    inputs: Inputs
    origin: str
    is_recorded: bool = True
    is_measured: bool = False

    def explain_mismatch(self, device: str, inputs: Inputs | None) -> str:
        """Return why a device takes no part, with both preparations; empty if it may."""
        expected = msgspec.structs.replace(self.inputs, mean=(), std=()) if self.is_measured else self.inputs
        mismatches = list(differences(inputs, expected)) if inputs else []
        if not mismatches:
            return ""
        device_inputs, run_inputs = ("; ".join(part) for part in zip(*mismatches, strict=True))
        return (
            f"device {device} takes no part, its inputs mean something else: it has {device_inputs}; "
            f"{self.origin} {run_inputs}. Set the same in [data] of the plan and of each device's file"
        )


def agree_on_inputs(
    agreed: RunInputs | None, statuses: Mapping[str, Status], devices: Iterable[str]
) -> RunInputs | None:
    """Return the inputs that devices agree on; None if none reports any.

    What the plan leaves open, such as the order of a table's columns, is taken from the first device.

    Args:
        agreed: Inputs of the plan or a record; None if neither has any.

    Raises:
        ConfigError: Two devices differ; the message has both.
    """
    for device in sorted(devices):
        inputs = statuses[device].inputs
        if inputs is None:
            continue
        if agreed is None:
            agreed = RunInputs(inputs, f"device {device} has", is_recorded=False)
        if refusal := agreed.explain_mismatch(device, inputs):
            raise ConfigError(refusal.replace(" takes no part", ": the run does not begin", 1))
        if (filled := agreed.inputs.fill_unknown(inputs)) != agreed.inputs:
            origin = f"the plan and device {device} have"
            agreed = replace(agreed, inputs=filled, origin=origin, is_recorded=False)
    return agreed
