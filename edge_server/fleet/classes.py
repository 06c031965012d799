"""Class names that a run goes by, and whether a device's own are the same: label 0 means one thing everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.data.classes import are_digits, contrast, normalise_class_names
from shared.errors import ConfigError
from shared.protocol.messages import Status


@dataclass(frozen=True)
class ClassNames:
    """The classes of a run.

    Attributes:
        names: In the order of their numbers; none where labels are plain numbers.
        origin: Who says so, for people.
        is_planned: Whether the plan names them: then devices number theirs by it, and may lack some.
        is_recorded: Whether a server that goes on with the run finds them without asking the devices.
    """

    names: tuple[str, ...]
    origin: str
    is_planned: bool = False
    is_recorded: bool = True

    def differ_from(self, told: Iterable[str] | None) -> bool:
        """Tell whether a device's classes are others; one that tells nothing is taken at its word."""
        if told is None:
            return False
        if self.is_planned:
            return not set(normalise_class_names(told)) <= set(self.names)
        return normalise_class_names(told) != self.names

    def names_for(self, told: Iterable[str] | None) -> list[str]:
        """Return what a task must say of the classes: nothing to a device that has told just these.

        Names that are all digits are always said: agents up to version 0.1 number such labels by their value.
        """
        is_told = told is not None and normalise_class_names(told) == normalise_class_names(self.names)
        return [] if is_told and not (self.names and are_digits(self.names)) else list(self.names)

    def refusal(self, device: str, told: Iterable[str]) -> str:
        """Return why a device takes no part, with both lists and the remedy."""
        theirs, ours = contrast(normalise_class_names(told), self.names)
        return (
            f"device {device} takes no part, its labels mean something else: its classes are {theirs}; "
            f"{self.origin} {ours}. Name its folders or labels alike, or name all classes in order under "
            "data.classes of the plan"
        )


def agreed_classes(statuses: Mapping[str, Status], devices: Iterable[str]) -> ClassNames | None:
    """Return the classes that devices agree on; None where nobody tells any.

    Args:
        statuses: What each device last told of itself.
        devices: Those that take part.

    Raises:
        ConfigError: Two of them differ; the message has both lists.
    """
    found: dict[str, tuple[str, ...]] = {}
    for device in devices:
        told = statuses[device].classes
        if told is not None:
            found[device] = normalise_class_names(told)
    if not found:
        return None
    first = min(found)
    names = ClassNames(found[first], f"those of {first} are", is_recorded=False)
    for device, others in sorted(found.items()):
        if names.differ_from(others):
            raise ConfigError(names.refusal(device, others).replace(" takes no part", ": the run does not begin", 1))
    return names
