"""Apply a task's class order, mean and deviation to a device's data."""

from __future__ import annotations

import msgspec

from shared.data.classes import with_classes
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.messages import Assignment


def with_assignment(data: Data, assignment: Assignment) -> Data:
    """Return a device's data with the class order, mean and deviation of a task.

    Raises:
        ConfigError: The device's own file names different classes, or sets a mean or deviation too.
    """
    named = with_classes(data, assignment.classes) if assignment.classes else data
    return with_moments(named, assignment.mean, assignment.std)


def with_moments(data: Data, mean: tuple[float, ...], std: tuple[float, ...]) -> Data:
    """Return data with a run's mean and deviation; unchanged if the run has none.

    Raises:
        ConfigError: The data set other ones.
    """
    if not mean and not std:
        return data
    if (data.mean or data.std) and (data.mean, data.std) != (mean, std):
        raise ConfigError(
            f"{data.path or data.source}: data.mean and std are set here, and the run measures its own over all "
            "devices (normalise); remove them from this device's file"
        )
    return msgspec.structs.replace(data, mean=mean, std=std, normalise=msgspec.UNSET)
