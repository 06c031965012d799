"""Class-to-label mapping of a run; rejects devices that disagree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.data.classes import are_digits, contrast, normalise_class_names
from shared.errors import ConfigError
from shared.protocol.messages import Status


@dataclass(frozen=True)
class ClassNames:
    """Class names of a run.

    Attributes:
        names: In order of their labels; empty where labels are plain numbers.
        origin: Source of the names, as the start of a sentence for people.
        is_planned: Whether the plan names them: then devices number their classes by it, and may lack some.
        is_recorded: Whether a resumed run finds them without asking the devices.
    """

    names: tuple[str, ...]
    origin: str
    is_planned: bool = False
    is_recorded: bool = True

    def differ_from(self, names: Iterable[str] | None) -> bool:
        """Return true if a device's classes do not match; a device that reports none is accepted."""
        if names is None:
            return False
        if self.is_planned:
            return not set(normalise_class_names(names)) <= set(self.names)
        return normalise_class_names(names) != self.names

    def names_for(self, names: Iterable[str] | None) -> list[str]:
        """Return the class names that a task must carry: none if the device reported the same.

        All-digit names are always included: agents up to version 0.1 number such labels by their value.
        """
        is_known = names is not None and normalise_class_names(names) == normalise_class_names(self.names)
        return [] if is_known and not (self.names and are_digits(self.names)) else list(self.names)

    def explain_mismatch(self, device: str, names: Iterable[str]) -> str:
        """Return why a device takes no part, with both lists and the remedy."""
        device_classes, run_classes = contrast(normalise_class_names(names), self.names)
        return (
            f"device {device} takes no part, its labels mean something else: its classes are {device_classes}; "
            f"{self.origin} {run_classes}. Name its folders or labels alike, or name all classes in order under "
            "data.classes of the plan"
        )


def agree_on_classes(statuses: Mapping[str, Status], devices: Iterable[str]) -> ClassNames | None:
    """Return the classes that devices agree on; None if none reports any.

    Raises:
        ConfigError: Two devices differ; the message has both lists.
    """
    reported: dict[str, tuple[str, ...]] = {}
    for device in devices:
        if (classes := statuses[device].classes) is not None:
            reported[device] = normalise_class_names(classes)
    if not reported:
        return None
    first = min(reported)
    names = ClassNames(reported[first], f"those of {first} are", is_recorded=False)
    for device, others in sorted(reported.items()):
        if names.differ_from(others):
            raise ConfigError(
                names.explain_mismatch(device, others).replace(" takes no part", ": the run does not begin", 1)
            )
    return names
