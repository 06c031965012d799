"""Class names of a data set in the order of their numbers, found without torch or numpy.

Label 0 must mean the same on every device: an agent tells its names when it connects, a plan may fix them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from shared.data.name_text import describe_invisible, find_lookalikes, normalise_name, show_name
from shared.data.sources.csv_lines import labels_of, split_paths
from shared.data.sources.npz_names import names_in_file
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.messages import MAX_CLASSES

log = logging.getLogger(__name__)

SYSTEM_FOLDERS = frozenset(
    (
        *("lost+found", "lost.dir", "system volume information", "$recycle.bin", "recycler", "recycled"),
        *("@eadir", "@tmp", "@recycle", "@recently-snapshot", "@sharesnap", "#recycle", "#snapshot"),
        *("__macosx", "network trash folder", "temporary items", "__pycache__"),
    )
)
"""Folders that file systems, network disks, archives and Python make by themselves, in lower case."""
_SYSTEM_FOLDER = re.compile(r"found\.\d{3}")
"""Where Windows keeps what it finds when it checks a disk."""
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
    path = Path(spec.path)
    match spec.source:
        case "folder":
            return as_told(find_class_folders(path, spec)[1])
        case "csv":
            return _number_names(_labels_in_table(spec), spec, path, f"column {spec.label_column!r}")
        case "npz":
            return _number_names(names_in_file(path), spec, path, "the array of labels")
        case _:
            return ()


def _number_names(found: Collection[str], spec: Data, path: Path, place: str) -> tuple[str, ...]:
    return as_told(names_of(number_labels(found, spec, path, place))) if found else ()


def _labels_in_table(spec: Data) -> set[str]:
    """Return the labels of both splits."""
    path, sibling = split_paths(spec)
    found = set[str]()
    for one in filter(None, (path, sibling)):
        for label in labels_of(one, spec):
            found.add(label)
            if len(found) > MAX_CLASSES:
                raise ConfigError(f"{path}: column {spec.label_column!r} has over {MAX_CLASSES} classes")
    return found


def names_of(numbers: dict[str, int]) -> tuple[str, ...]:
    """Return names in the order of their numbers; none where each name is a number that stands for itself."""
    if all(name == str(number) for name, number in numbers.items()):
        return ()
    return tuple(sorted(numbers, key=numbers.__getitem__))


def as_told(names: Iterable[str]) -> tuple[str, ...]:
    """Return names as devices and server compare them: NFC, and none where they are the numbers from 0, in order."""
    names = tuple(map(normalise_name, names))
    return () if names == tuple(map(str, range(len(names)))) else names


def are_digits(names: Iterable[str]) -> bool:
    """Tell whether all names are digits: versions up to 0.1 numbered such labels of a table by their value."""
    return all(name.isascii() and name.isdigit() for name in names)


def number_labels(labels: Collection[str], spec: Data, path: Path, place: str) -> dict[str, int]:
    """Return every label's number: its place in `spec.classes`; itself, if all are numbers from 0; else its rank.

    A label is a number only as it would be printed: "01" is a name, and so then are all labels beside it.

    Args:
        labels: Those that occur, as `normalise_name` returns them.
        spec: Names the classes, or does not.
        path: Where they were read, for the error.
        place: Column or array of the file, for the error.

    Raises:
        ConfigError: One is not among `spec.classes`, is a fraction, or has a character that nobody sees.
    """
    require_visible(labels, f"{path}: {place}")
    if spec.classes:
        require_known(labels, spec.classes, path)
        return {label: number for number, label in enumerate(spec.classes)}
    if fractions := sorted(filter(_FRACTION.fullmatch, labels)):
        raise ConfigError(
            f"{path}: {place} holds {fractions[0]!r}: a class is a name or a whole number from 0, "
            "regression comes later; correct label_column or the column"
        )
    if are_digits(labels) and all(len(label) <= MAX_DIGITS and str(int(label)) == label for label in labels):
        return {label: int(label) for label in labels}
    return {label: rank for rank, label in enumerate(sorted(labels))}


def require_visible(names: Iterable[str], place: str) -> None:
    """Refuse class names with characters that are not shown, such as a zero-width space.

    Args:
        place: Where, for the error.

    Raises:
        ConfigError: One has such a character; the message has the escaped name.
    """
    for name in names:
        if problem := describe_invisible(name):
            raise ConfigError(f"{place}: class name {problem}; rename it")


def find_class_folders(root: Path, spec: Data) -> tuple[Path, tuple[str, ...]]:
    """Return where a split's class folders are, and the classes of both splits, so that both number them alike.

    Args:
        spec: Which split; may name the classes.

    Raises:
        ConfigError: There is no such folder, one is not among `spec.classes`, or a name cannot be shown or sent.
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
        found = {name for half in halves or [root] for name in list_class_folders(half)}
    except OSError as error:
        raise ConfigError(f"{root}: cannot be listed ({error}); correct path or the folder's permissions") from error
    skipped = sorted(name for name in found - set(spec.classes or ()) if is_system_folder(name))
    if skipped:
        log.warning("%s: skipped %s: not a class but a folder of the system", root, listed(skipped))
    names = sorted(found.difference(skipped))
    if spec.reads_labels:
        require_visible(names, str(root))
    if spec.classes:
        require_known(names, spec.classes, root)
    return (root / split if halves else root), spec.classes or tuple(names)


def is_system_folder(name: str) -> bool:
    """Whether a folder of this name is made by a system and holds no examples."""
    return name.lower() in SYSTEM_FOLDERS or _SYSTEM_FOLDER.fullmatch(name.lower()) is not None


def list_class_folders(place: Path) -> dict[str, list[Path]]:
    """Return the folders of each class of a split; two that are one name in NFC and NFD are one class.

    Raises:
        OSError: The split's folder cannot be listed.
    """
    found = dict[str, list[Path]]()
    for path in sorted(place.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            found.setdefault(normalise_name(path.name), []).append(path)
    return found


def require_known(found: Iterable[str], classes: Sequence[str], path: Path) -> None:
    """Refuse class names that a plan or a task does not know.

    Args:
        path: Where they were found.

    Raises:
        ConfigError: One is unknown; the message has both lists.
    """
    if unknown := sorted(set(found) - set(classes)):
        here, there = contrast(sorted(found), classes)
        raise ConfigError(
            f"{path}: class {unknown[0]!r} is not among the run's: here {here}; there {there}; rename it, or name it "
            "in data.classes of the plan"
        )


def require_number(highest: int, classes: Sequence[str], path: Path) -> None:
    """Refuse labels that are numbers beyond the named classes.

    Args:
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
    names = tuple(map(normalise_name, names))
    if not names or data.classes == names or not data.is_labelled:
        return data
    if data.classes:
        planned, own = contrast(names, data.classes)
        raise ConfigError(f"data.classes: the run's are {planned}, this device's {own}; correct its file")
    return msgspec.structs.replace(data, classes=names)


def listed(names: Sequence[str], escaped: Collection[str] = ()) -> str:
    """Return class names for people, not too many of them; those in `escaped` with escapes."""
    if not names:
        return "numbers without names"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(show_name(name, escaped=name in escaped) for name in names[:NAMED]) + more


def contrast(names: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """Return two different lists of class names so that people see where they differ.

    Names that print alike are shown with escapes. Of long lists only what differs is shown.
    """
    lists = (names, others)
    alone = [[name for name in one if name not in set(other)] for one, other in (lists, lists[::-1])]
    escaped = find_lookalikes(*alone)
    if max(map(len, lists)) <= NAMED:
        return listed(names, escaped), listed(others, escaped)
    if not any(alone):  # the same names in another order
        place = next((at for at, (one, other) in enumerate(zip(*lists, strict=False)) if one != other), 0)
        shown = [f"{len(one)} names, number {place} is {listed(one[place : place + 1])}" for one in lists]
    else:
        shown = [_show_alone(one, only, escaped) for one, only in zip(lists, alone, strict=True)]
    return shown[0], shown[1]


def _show_alone(names: Sequence[str], only: Sequence[str], escaped: Collection[str]) -> str:
    if len(names) <= NAMED:
        return listed(names, escaped)
    return f"{len(names)} names, of which only here {listed(only, escaped) if only else 'none'}"
