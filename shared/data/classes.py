"""Class names of a data set in the order of their numbers, found without torch or numpy.

Label 0 must mean the same on every device: an agent tells its names when it connects, a plan may fix them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from shared.data.sources.csv_lines import labels_of, split_paths
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.messages import MAX_CLASSES

MAX_DIGITS = 9
"""Longer numbers are names."""
NAMED = 12
"""Classes that a message lists."""
_FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


def class_names(spec: Data) -> tuple[str, ...] | None:
    """Return a data set's class names in the order of their numbers; none where labels are numbers in the files.

    None in place of names where no label is read: then the files, which may have labels, are not looked at.

    Raises:
        ConfigError: The files cannot be read, or a label is none.
    """
    if not spec.is_labelled:
        return None
    if spec.classes:
        return as_told(spec.classes)
    match spec.source:
        case "folder":
            return as_told(find_class_folders(Path(spec.path), spec)[1])
        case "csv":
            path, sibling = split_paths(spec)
            found = set[str]()
            for one in filter(None, (path, sibling)):
                for label in labels_of(one, spec):
                    found.add(label)
                    if len(found) > MAX_CLASSES:
                        raise ConfigError(f"{path}: column {spec.label_column!r} has over {MAX_CLASSES} classes")
            return as_told(names_of(number_labels(found, spec, path)))
        case _:
            return ()


def names_of(numbers: dict[str, int]) -> tuple[str, ...]:
    """Return names in the order of their numbers; none where each name is a number that stands for itself."""
    if all(name == str(number) for name, number in numbers.items()):
        return ()
    return tuple(sorted(numbers, key=numbers.__getitem__))


def as_told(names: Iterable[str]) -> tuple[str, ...]:
    """Return names as devices and server compare them: none where they are the numbers from 0, in order."""
    names = tuple(names)
    return () if names == tuple(map(str, range(len(names)))) else names


def number_labels(labels: Collection[str], spec: Data, path: Path) -> dict[str, int]:
    """Return every label's number: its place in `spec.classes`; itself, if all are numbers from 0; else its rank.

    Args:
        labels: Those that occur.
        spec: Names the classes, or does not.
        path: Where they were read, for the error.

    Raises:
        ConfigError: One is not among `spec.classes`, or is a fraction.
    """
    if spec.classes:
        require_known(labels, spec.classes, path)
        return {label: number for number, label in enumerate(spec.classes)}
    if fractions := sorted(filter(_FRACTION.fullmatch, labels)):
        raise ConfigError(
            f"{path}: column {spec.label_column!r} holds {fractions[0]!r}: a class is a name or a whole number from 0, "
            "regression comes later; correct label_column or the column"
        )
    if all(label.isascii() and label.isdigit() and len(label) <= MAX_DIGITS for label in labels):
        return {label: int(label) for label in labels}
    return {label: rank for rank, label in enumerate(sorted(labels))}


def find_class_folders(root: Path, spec: Data) -> tuple[Path, tuple[str, ...]]:
    """Return where a split's class folders are, and the classes of both splits, so that both number them alike.

    Args:
        root: The data set.
        spec: Which split; may name the classes.

    Raises:
        ConfigError: There is no such folder, or one is not among `spec.classes`.
    """
    split = spec.split
    try:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder; correct path")
        halves = [root / name for name in ("train", "test") if (root / name).is_dir()]
        if not halves and split == "test":
            raise ConfigError(f"{root}: has no test split; make folders train and test in it, or use holdout")
        if halves and root / split not in halves:
            raise ConfigError(f"{root / split}: no such folder; make it, beside {halves[0].name}")
        found = {each.name for half in halves or [root] for each in half.iterdir() if each.is_dir()}
    except OSError as error:
        raise ConfigError(f"{root}: cannot be listed ({error}); correct path or the folder's permissions") from error
    names = sorted(name for name in found if not name.startswith("."))
    if spec.classes:
        require_known(names, spec.classes, root)
    return (root / split if halves else root), spec.classes or tuple(names)


def require_known(found: Iterable[str], classes: Sequence[str], path: Path) -> None:
    """Refuse class names that a plan or a task does not know.

    Args:
        found: On this machine.
        classes: Of the plan.
        path: Where they were found.

    Raises:
        ConfigError: One is unknown; the message has both lists.
    """
    if unknown := sorted(set(found) - set(classes)):
        raise ConfigError(
            f"{path}: class {unknown[0]!r} is not among the run's: here {listed(sorted(found))}; "
            f"there {listed(classes)}; rename it, or name it in data.classes of the plan"
        )


def require_number(highest: int, classes: Sequence[str], path: Path) -> None:
    """Refuse labels that are numbers beyond the named classes.

    Args:
        highest: Of the labels.
        classes: Of the plan.
        path: Where the labels were found.

    Raises:
        ConfigError: There are fewer classes.
    """
    if highest >= len(classes):
        raise ConfigError(f"{path}: holds the label {highest}, and data.classes names {len(classes)}: correct either")


def with_classes(data: Data, names: Sequence[str]) -> Data:
    """Return a device's data with its classes numbered as a task says.

    It is as it was where the task says nothing, or where no label is read.

    Raises:
        ConfigError: The device's own file names others.
    """
    if not names or data.classes == tuple(names) or not data.is_labelled:
        return data
    if data.classes:
        raise ConfigError(
            f"data.classes: the run's are {listed(names)}, this device's {listed(data.classes)}; correct its file"
        )
    return msgspec.structs.replace(data, classes=tuple(names))


def listed(names: Sequence[str]) -> str:
    """Return class names for people, not too many of them."""
    if not names:
        return "numbers without names"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(one if one.isprintable() else ascii(one) for one in names[:NAMED]) + more
