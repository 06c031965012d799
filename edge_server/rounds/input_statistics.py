"""Mean and deviation of a run's inputs, measured over all devices before round 1."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from edge_server.fleet.inputs import RunInputs
from edge_server.journal.records import AnyRecord, Measured, select
from edge_server.plan.plan import Plan
from shared.data.moments import find_mean_and_std, require_moments
from shared.errors import ConfigError, WireError
from shared.protocol.inputs import Inputs
from shared.protocol.messages import INPUT_SUMS, Assignment, Update

log = logging.getLogger(__name__)


def is_federated(plan: Plan) -> bool:
    """Check whether devices measure the mean and deviation of the inputs."""
    return plan.data is not msgspec.UNSET and plan.data.normalise == "federated"


def request_sums(assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Return assignments of a measurement that ask for the sums of inputs too, without a split session."""
    return {
        device: msgspec.structs.replace(task, steps=0, values={**task.values, INPUT_SUMS: True})
        for device, task in assignments.items()
    }


def fold_sums(updates: Mapping[str, Update], failed: Mapping[str, str]) -> Inputs:
    """Return the mean and deviation over the devices whose sums are sound.

    Args:
        failed: Causes of failed devices by name, for the error.

    Raises:
        ConfigError: No device sent sums, or they have different numbers of channels.
    """
    sums, faults = {}, dict(failed)
    for device, update in sorted(updates.items()):
        try:
            require_moments(update.sums)
            sums[device] = update.sums
        except WireError as error:
            faults[device] = str(error)
            log.warning("device %s: its sums of inputs do not count: %s", device, error)
    if not sums:
        cause = next((f"; {device}: {cause}" for device, cause in sorted(faults.items())), "")
        raise ConfigError(
            f"data.normalise: no device sent the sums of its inputs{cause}; correct the devices, or set mean and std"
        )
    channels = {device: len(figures["input_sum"]) for device, figures in sums.items()}
    if len(set(channels.values())) > 1:
        first, other = min(channels, key=channels.__getitem__), max(channels, key=channels.__getitem__)
        raise ConfigError(
            f"data.normalise: {first} has {channels[first]} channels, {other} has {channels[other]}; give all devices "
            "the same kind of inputs"
        )
    mean, std = find_mean_and_std(sums.values())
    return Inputs(mean=mean, std=std)


def find_measured(records: Sequence[AnyRecord]) -> Inputs | None:
    """Return the mean and deviation that a run recorded; None before it measured them."""
    measured = [record.inputs for record in select(records, Measured) if record.inputs]
    return measured[-1] if measured else None


def add_moments(prior: RunInputs | None, measured: Inputs) -> RunInputs:
    """Return a run's inputs with the measured mean and deviation, still to be recorded with a round."""
    prior = prior or RunInputs(Inputs(), "the run has")
    inputs = msgspec.structs.replace(prior.inputs, mean=measured.mean, std=measured.std)
    return replace(prior, inputs=inputs, is_measured=True, is_recorded=prior.inputs == inputs and prior.is_recorded)
