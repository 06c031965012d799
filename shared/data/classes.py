"""Class names of a data set in label order, read without torch or numpy.

Label 0 must mean the same on every device: an agent sends its names when it connects, a plan may fix them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from shared.data.name_text import describe_invisible, find_lookalikes, normalise_name, show_name
from shared.data.spec import EVALUATE_ON_DEVICES, Data
from shared.errors import ConfigError, describe_cause
from shared.protocol.messages import MAX_CLASSES

log = logging.getLogger(__name__)

SYSTEM_FOLDERS = frozenset(
    (
        *("lost+found", "lost.dir", "system volume information", "$recycle.bin", "recycler", "recycled"),
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "@sharesnap", "#recycle", "#snapshot"),
        *("__macosx", "network trash folder", "temporary items", "__pycache__"),
    )
)
"""Folders that file systems, network disks, archives and Python create, in lower case."""
_SYSTEM_FOLDER = re.compile(r"found\.\d{3}")
"""Folder in which Windows stores the fragments that it recovers when it checks a disk."""
MAX_DIGITS = 9
"""Longer numbers count as names."""
MAX_LISTED = 12
"""Classes that a message lists."""
_FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


def class_names(spec: Data) -> tuple[str, ...] | None:
    """Return a data set's class names in label order; empty where labels are numbers.

    None where no class is read, or only the trainer can read it.

    Raises:
        ConfigError: The files cannot be read, or a label is invalid.
    """
    if not spec.has_classes:
        return None
    if spec.classes:
        return normalise_class_names(spec.classes)
    path = Path(spec.path)
    if spec.source in ("folder", "audio"):
        return normalise_class_names(find_class_folders(path, spec)[1])
    if spec.source in ("digits", "idx"):
        return ()
    readers: Mapping[str, Callable[[Data], set[str]]] = {
        "csv": _labels_in_table,
        "npz": _labels_in_arrays,
        "sqlite": _labels_in_databases,
    }
    if spec.source not in readers:
        return None
    labels = readers[spec.source](spec)
    place = "the array of labels" if spec.source == "npz" else f"column {spec.label_column!r}"
    return normalise_class_names(order_names(number_labels(labels, spec, path, place))) if labels else ()


def _labels_in_table(spec: Data) -> set[str]:
    """Collect the labels of both splits."""
    from shared.data.sources.csv_lines import read_labels, split_paths  # noqa: PLC0415 - for such files alone

    path, sibling = split_paths(spec)
    labels = set[str]()
    for table in filter(None, (path, sibling)):
        for label in read_labels(table, spec):
            labels.add(label)
            if len(labels) > MAX_CLASSES:
                raise ConfigError(f"{path}: column {spec.label_column!r} has over {MAX_CLASSES} classes")
    return labels


def _labels_in_arrays(spec: Data) -> set[str]:
    from shared.data.sources.npz_names import read_class_names  # noqa: PLC0415 - as above

    return read_class_names(Path(spec.path))


def _labels_in_databases(spec: Data) -> set[str]:
    """Collect the labels of both splits."""
    from shared.data.sources.csv_lines import split_paths  # noqa: PLC0415 - as above
    from shared.data.sources.sqlite_rows import read_label_names  # noqa: PLC0415 - as above

    labels = set[str]()
    for path in filter(None, split_paths(spec, ".sqlite")):
        labels |= read_label_names(path, spec, MAX_CLASSES)
        if len(labels) > MAX_CLASSES:
            raise ConfigError(f"{path}: column {spec.label_column!r} has over {MAX_CLASSES} classes")
    return labels


def order_names(numbers: dict[str, int]) -> tuple[str, ...]:
    """Sort names by their number; empty where every name is the number itself."""
    if all(name == str(number) for name, number in numbers.items()):
        return ()
    return tuple(sorted(numbers, key=numbers.__getitem__))


def normalise_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names as devices and server compare them: in NFC, and empty where they are 0, 1, 2, … in order."""
    names = tuple(map(normalise_name, names))
    return () if names == tuple(map(str, range(len(names)))) else names


def are_digits(names: Iterable[str]) -> bool:
    """Check that all names are digits: versions up to 0.1 numbered such labels of a table by their value."""
    return all(name.isascii() and name.isdigit() for name in names)


def number_labels(labels: Collection[str], spec: Data, path: Path, place: str) -> dict[str, int]:
    """Assign a number to every label: its index in `spec.classes`; itself, if all are integers from 0; else its rank.

    A label counts as a number only in canonical form: "01" is a name, and then so are all other labels.

    Args:
        labels: Distinct labels, as `normalise_name` returns them.
        path: File that they come from, for the error.
        place: Column or array of the file, for the error.

    Raises:
        ConfigError: A label is not in `spec.classes`, is a fraction, or has an invisible character.
    """
    require_visible(labels, f"{path}: {place}")
    if spec.classes:
        require_known(labels, spec.classes, path)
        return {label: number for number, label in enumerate(spec.classes)}
    if fractions := sorted(filter(_FRACTION.fullmatch, labels)):
        raise ConfigError(
            f"{path}: {place} holds {fractions[0]!r}: a class is a name or a whole number from 0, "
            "correct label_column, or name a column of numbers to predict by target_columns"
        )
    if are_digits(labels) and all(len(label) <= MAX_DIGITS and str(int(label)) == label for label in labels):
        return {label: int(label) for label in labels}
    return {label: rank for rank, label in enumerate(sorted(labels))}


def require_visible(names: Iterable[str], place: str) -> None:
    """Refuse class names with invisible characters, such as a zero-width space.

    Args:
        place: Source of the names, for the error.

    Raises:
        ConfigError: A name has such a character; the message shows it escaped.
    """
    for name in names:
        if problem := describe_invisible(name):
            raise ConfigError(f"{place}: class name {problem}; rename it")


def find_class_folders(root: Path, spec: Data) -> tuple[Path, tuple[str, ...]]:
    """Find the folder of a split's classes, and the classes of both splits, so that both are numbered alike.

    Raises:
        ConfigError: The folder does not exist, a class is not in `spec.classes`, or a name cannot be shown or sent.
    """
    split = spec.split
    try:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder; correct path")
        halves = [root / name for name in ("train", "test") if (root / name).is_dir()]
        if not halves and split == "test":
            raise ConfigError(f"{root}: has no test split; make folders train and test in it, {EVALUATE_ON_DEVICES}")
        if halves and root / split not in halves:
            raise ConfigError(f"{root / split}: no such folder; make it, beside {halves[0].name}")
        folder_names = {name for half in halves or [root] for name in list_class_folders(half)}
    except OSError as error:
        raise ConfigError(
            f"{root}: cannot be listed ({describe_cause(error)}); correct path or the folder's permissions"
        ) from error
    skipped = sorted(name for name in folder_names - set(spec.classes or ()) if is_system_folder(name))
    if skipped:
        log.warning("%s: skipped %s: not a class but a folder of the system", root, format_class_names(skipped))
    names = sorted(folder_names.difference(skipped))
    if spec.reads_labels:
        require_visible(names, str(root))
    if spec.classes:
        require_known(names, spec.classes, root)
    return (root / split if halves else root), spec.classes or tuple(names)


def is_system_folder(name: str) -> bool:
    """Check whether a folder of this name belongs to a system and holds no examples."""
    return name.lower() in SYSTEM_FOLDERS or _SYSTEM_FOLDER.fullmatch(name.lower()) is not None


def is_folder(entry: Path | os.DirEntry[str]) -> bool:
    """Check for a folder or a symbolic link to one; false for a link that leads in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def list_class_folders(place: Path) -> dict[str, list[Path]]:
    """List the folders of each class of a split; names equal after NFC normalisation are one class.

    Raises:
        OSError: The split's folder cannot be listed.
    """
    folders = dict[str, list[Path]]()
    for path in sorted(place.iterdir()):
        if is_folder(path) and not path.name.startswith("."):
            folders.setdefault(normalise_name(path.name), []).append(path)
    return folders


def require_known(names: Iterable[str], classes: Sequence[str], path: Path) -> None:
    """Refuse class names that a plan or a task does not list.

    Args:
        path: Source of the names, for the error.

    Raises:
        ConfigError: A name is unknown; the message has both lists.
    """
    if unknown := sorted(set(names) - set(classes)):
        local, expected = contrast(sorted(names), classes)
        raise ConfigError(
            f"{path}: class {unknown[0]!r} is not one of the run's: this data set has {local}; the run has {expected}; "
            "rename it, or name it in data.classes of the plan"
        )


def require_number(highest: int, classes: Sequence[str], path: Path) -> None:
    """Refuse numeric labels beyond the named classes.

    Args:
        path: Source of the labels, for the error.

    Raises:
        ConfigError: There are fewer classes.
    """
    if highest >= len(classes):
        raise ConfigError(f"{path}: holds the label {highest}, and data.classes names {len(classes)}: correct either")


def with_classes(data: Data, names: Sequence[str]) -> Data:
    """Return a device's data with the class order of a task; unchanged if the task gives none or no label is read.

    Raises:
        ConfigError: The device's own file names different classes.
    """
    names = tuple(map(normalise_name, names))
    if not names or data.classes == names or not data.has_classes:
        return data
    if data.classes:
        planned, local = contrast(names, data.classes)
        raise ConfigError(f"data.classes: the run's are {planned}, this device's {local}; correct its file")
    return msgspec.structs.replace(data, classes=names)


def format_class_names(names: Sequence[str], escaped: Collection[str] = ()) -> str:
    """Format class names for a message, at most `MAX_LISTED` of them; those in `escaped` with escapes."""
    if not names:
        return "numbers without names"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(show_name(name, escaped=name in escaped) for name in names[:MAX_LISTED]) + more


def contrast(names: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """Format two different lists of class names so that the difference is visible.

    Names that print alike are escaped; of long lists only the difference is shown.
    """
    lists = (names, others)
    unique = [[name for name in first if name not in set(other)] for first, other in (lists, lists[::-1])]
    escaped = find_lookalikes(*unique)
    if max(map(len, lists)) <= MAX_LISTED:
        return format_class_names(names, escaped), format_class_names(others, escaped)
    if not any(unique):  # the same names in another order
        place = next((at for at, (name, other) in enumerate(zip(*lists, strict=False)) if name != other), 0)
        texts = [
            f"{len(entries)} names, number {place} is {format_class_names(entries[place : place + 1])}"
            for entries in lists
        ]
    else:
        texts = [_format_difference(entries, only, escaped) for entries, only in zip(lists, unique, strict=True)]
    return texts[0], texts[1]


def _format_difference(names: Sequence[str], only: Sequence[str], escaped: Collection[str]) -> str:
    if len(names) <= MAX_LISTED:
        return format_class_names(names, escaped)
    return f"{len(names)} names, of which only in this list: {format_class_names(only, escaped) if only else 'none'}"
