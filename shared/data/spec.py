"""Data section of a configuration or task: source, partition, split, preprocessing.

Parsed without torch, numpy or access to the disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from shared.data.name_text import describe_invisible, normalise_name
from shared.protocol.messages import MAX_CLASS_CHARS, MAX_CLASSES


def _require_part(parts: int, index: int, seed: int) -> None:
    if parts < 1:
        raise ValueError(f"parts must be >= 1, not {parts}")
    if not 0 <= index < parts:
        raise ValueError(f"index must be from 0 to parts - 1 = {parts - 1}, not {index}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, not {seed}")


class Dirichlet(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="dirichlet"
):
    """Part `index` of `parts` with class shares drawn from a Dirichlet distribution: `partition.split_dirichlet`.

    Attributes:
        alpha: Concentration: 0.1 is very unequal, 100 nearly even.
        parts: Number of devices that share the data set.
        index: This device's part, from 0.
        seed: Seed of the draw; the same on all devices, or their parts overlap.
        min_examples: Lower bound of every part's size.
    """

    alpha: float
    parts: int
    index: int
    seed: int = 0
    min_examples: int = 8

    def __post_init__(self) -> None:
        """Refuse values that no data set can satisfy."""
        _require_part(self.parts, self.index, self.seed)
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"alpha must be above zero and finite, not {self.alpha}")
        if self.min_examples < 0:
            raise ValueError(f"min_examples must be >= 0, not {self.min_examples}")


class Shards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="shards"):
    """Part `index` of `parts`, each with a few runs of the examples sorted by label; see `partition.split_shards`.

    Attributes:
        shards_per_device: Runs of sorted examples per part.
        parts: Number of devices that share the data set.
        index: This device's part, from 0.
        seed: Seed of the draw; the same on all devices, or their parts overlap.
    """

    shards_per_device: int = 2
    parts: int
    index: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no data set can satisfy."""
        _require_part(self.parts, self.index, self.seed)
        if self.shards_per_device < 1:
            raise ValueError(f"shards_per_device must be >= 1, not {self.shards_per_device}")


class Even(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="even"):
    """Part `index` of `parts` of equal size and, but for chance, equal class shares.

    Attributes:
        parts: Number of devices that share the data set.
        index: This device's part, from 0.
        seed: Seed of the shuffle; the same on all devices, or their parts overlap.
    """

    parts: int
    index: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no data set can satisfy."""
        _require_part(self.parts, self.index, self.seed)


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="client"):
    """The examples of one client of the data set: a writer, a subject, a sensor.

    Attributes:
        client: Name of the client, as in the data set.
    """

    client: str


Partition: TypeAlias = Dirichlet | Shards | Even | Client
"""This device's share of the data set; the key `kind` selects the type."""


class Drawn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A balanced sample of a data set, drawn before the remaining examples are partitioned.

    Attributes:
        per_class: Examples of each class; or give `count`.
        count: Examples in all, divided equally among the classes; some get one more where it does not divide.
        seed: Decides which examples of a class are drawn.
    """

    per_class: int = 0
    count: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a draw of nothing, or of two sizes."""
        if self.per_class < 0 or self.count < 0 or (self.per_class > 0) == (self.count > 0):
            raise ValueError("give per_class or count, one of them, above zero")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, not {self.seed}")


def require_class_names(names: Sequence[str]) -> None:
    """Refuse class names that are ambiguous or too long to send.

    Raises:
        ValueError: There are none or too many, one is empty or has an invisible character, or two are the same.
    """
    if not names or not all(names) or len(set(names)) != len(names):
        raise ValueError("classes must be names, each once; leave them out where the labels are numbers")
    if problem := next(filter(None, map(describe_invisible, names)), ""):
        raise ValueError(f"classes: {problem}; rename it")
    if len(names) > MAX_CLASSES or sum(map(len, names)) > MAX_CLASS_CHARS:
        raise ValueError(f"classes must be {MAX_CLASSES} names and {MAX_CLASS_CHARS} characters at most")


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of a process's examples, and the selection that it takes.

    Attributes:
        source: Format of the files; `device_agent/README.md` describes what each source expects.
        path: File or folder to read; relative to the folder of data sets, of an agent to the working directory. Not
            needed by `digits`.
        split: The half of the data set that its authors set aside for training or for testing.
        partition: This device's share; absent for all. In a plan, `[partition]` deals the data instead.
        holdout: Share of this device's own examples reserved for evaluation on the device, in [0, 1).
        validation: Share of the remaining examples reserved for validation during training, in [0, 1).
        mean: Subtracted from each channel: one number for all or one per channel, the same for all devices; empty for
            unchanged inputs.
        std: Divides each channel after that; one number for all or one per channel, empty for unchanged inputs.
        augment: Augmentation of pictures in training: `crop-flip` shifts and mirrors them.
        limit: At most this many examples, drawn with a fixed seed before the partition; absent for all.
        labels: `none`: no label is read, and the files need not hold any; such examples serve methods that train
            without labels, and no evaluation. Only where a `[partition]` deals one data set by class, as a simulation
            does, labels are read for the dealing and dropped at once.
        drawn: Only these examples of those within `limit`, such as the few that a server has labels of. In a plan's
            `[server_data]` they are removed from `[data]` before that is dealt out, where both are one data set.
        without: Not these examples: those that `drawn` takes elsewhere. Set by the plan, not by hand.
        classes: Class names in label order, the same on all devices: label 0 is the first. Absent for alphabetical
            order or numbers; then devices whose names differ are refused.
        channels: Of pictures: 1 for grey, 3 for colour; absent for grey where all pictures of a device are. Grey ones
            become colour with three equal channels. Set it where devices of one run have grey and coloured pictures.
        label_column: Name of the CSV column that holds the class.
        skip_columns: Names of CSV columns to leave out, such as a time or an index; "" for one without a name.
        separator: Character between the cells of a CSV file; absent for a comma. Numbers have a decimal point.
        client_column: Producer of each example: CSV column, npz array, or `writer` or `series` of QMNIST's label files
            beside MNIST's (`idx`). Empty where examples have no producer.
    """

    source: Literal["digits", "idx", "npz", "folder", "csv"]
    path: str = ""
    split: Literal["train", "test"] = "train"
    partition: Partition | None = None
    holdout: float = 0.0
    validation: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Literal["none", "crop-flip"] = "none"
    limit: int | None = None
    labels: Literal["none"] | msgspec.UnsetType = msgspec.UNSET
    drawn: Drawn | msgspec.UnsetType = msgspec.UNSET
    without: Drawn | msgspec.UnsetType = msgspec.UNSET
    classes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # absent in records of earlier versions
    channels: Literal[1, 3] | msgspec.UnsetType = msgspec.UNSET
    label_column: str = "label"
    skip_columns: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    separator: str | msgspec.UnsetType = msgspec.UNSET
    client_column: str = ""

    @property
    def is_labelled(self) -> bool:
        """True if the examples have labels."""
        return not self.labels

    @property
    def reads_labels(self) -> bool:
        """True if labels are read from the files, if only to partition the examples."""
        return self.is_labelled or bool(self.without) or isinstance(self.partition, Dirichlet | Shards)

    def drop_labels(self) -> Data:
        """Return the same examples for training without labels; hold-out and validation shares stay."""
        bare = msgspec.structs.replace(self, labels="none", drawn=msgspec.UNSET, holdout=0.0, validation=0.0)
        for name in ("holdout", "validation"):  # the constructor refuses them without labels, which evaluation needs
            msgspec.structs.force_setattr(bare, name, getattr(self, name))
        return bare

    def __post_init__(self) -> None:
        """Refuse values out of range, and keys that the source would ignore."""
        if not 0 <= self.holdout < 1:
            raise ValueError(f"holdout must be in [0, 1), not {self.holdout}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be in [0, 1), not {self.validation}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be >= 1, not {self.limit}; leave it out for all examples")
        if not all(map(math.isfinite, self.mean)) or not all(0 < deviation < math.inf for deviation in self.std):
            raise ValueError("mean must be finite, std above zero and finite")
        if self.classes is not msgspec.UNSET:
            msgspec.structs.force_setattr(self, "classes", tuple(map(normalise_name, self.classes)))
            require_class_names(self.classes)
        self._require_labels()
        if self.source != "digits" and not self.path:
            raise ValueError(f"path must name the file or folder that source {self.source!r} reads")
        if self.client_column and self.source in ("digits", "folder"):
            raise ValueError(f"client_column means nothing to source {self.source!r}; remove it")
        self._require_csv()

    def _require_csv(self) -> None:
        """Refuse invalid CSV keys, and CSV keys of another source."""
        for key in ("skip_columns", "separator"):
            if self.source != "csv" and getattr(self, key) is not msgspec.UNSET:
                raise ValueError(f"{key} means nothing to source {self.source!r}; remove it")
        if self.separator is not msgspec.UNSET and (len(self.separator) != 1 or self.separator in '\r\n"\0'):
            raise ValueError(f'separator must be one character such as ";" or "\\t", not {self.separator!r}')
        if named := {self.label_column, self.client_column} & set(self.skip_columns or ()) - {""}:
            raise ValueError(f"skip_columns leaves out {min(named)!r}, which label_column or client_column names")

    def _require_labels(self) -> None:
        """Refuse keys that need labels where none is read."""
        if self.labels and (self.holdout or self.validation):
            raise ValueError('examples with labels = "none" cannot be evaluated: set holdout and validation to 0')
        if self.labels and self.drawn:
            raise ValueError('drawn takes examples by their class, and labels = "none" has none: take out one')
