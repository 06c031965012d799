"""Data section of a configuration or task: source, partition, split, preprocessing.

Parsed without torch, numpy or access to the disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from shared.data.formats import Mel, Window
from shared.data.name_text import describe_invisible, normalise_name
from shared.errors import ConfigError
from shared.protocol.messages import MAX_CLASS_CHARS, MAX_CLASSES, Scalar
from shared.registry import Registry, locate
from shared.spelling import guess

TABLES = ("csv", "parquet", "sqlite")
"""Sources with named columns."""
NONE = "none"
"""Source without examples."""
SOURCE_NAMES = ("digits", "idx", "npz", "folder", "audio", *TABLES, NONE)
"""Built-in sources; others are plugins."""
CUSTOM = "module:function"
KEY_SOURCES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("skip_columns", "feature_columns", "target_columns", "time_column", "time_format"), TABLES),
    **dict.fromkeys(("drop_missing", "window"), TABLES),
    **dict.fromkeys(("separator", "decimal"), ("csv",)),
    "table": ("sqlite",),
    **dict.fromkeys(("masks", "size"), ("folder",)),
    "mel": ("audio",),
    "targets": ("npz", CUSTOM),
    "options": (CUSTOM,),
}
"""Sources that read each optional key."""
EVALUATE_ON_DEVICES = (
    "or set evaluation.every to 0 and evaluation.on_device to true, so that devices evaluate on what they hold out "
    "(data.holdout)"
)
"""Remedy where a plan's server has no test data."""
MAX_SIDE = 1 << 14
"""Largest side of a resized picture, in pixels."""
TargetKind: TypeAlias = Literal["class", "values", "mask"]


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


def require_source(spec: Data, place: str) -> None:
    """Refuse a source that is neither built in nor a plugin; a plugin is not imported, and may not be allowed.

    Args:
        place: File of the configuration.

    Raises:
        ConfigError: It is unknown.
    """
    if spec.source not in SOURCE_NAMES and locate(Registry("source", "sources", {}), spec.source) is None:
        names = f"{', '.join(sorted(SOURCE_NAMES))}{guess(spec.source, SOURCE_NAMES)}"
        raise ConfigError(f"{place}: data.source: unknown source {spec.source[:60]!r}; known: {names}")


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of a process's examples, and the selection that it takes.

    Attributes:
        source: Format of the files: `digits`, `idx`, `npz`, `folder`, `audio`, `csv`, `parquet`, `sqlite`, or
            `module:function` of your own or another plugin; `device_agent/README.md` describes what each expects.
            `none`: no examples, for a method whose program reads its own (`flower`).
        path: File or folder to read; relative to the folder of data sets, of an agent to the working directory. Not
            needed by `digits` and `none`.
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
        label_column: Name of the table column that holds the class.
        skip_columns: Names of table columns to leave out, such as an index; "" for one without a name.
        separator: Character between the cells of a CSV file; absent for a comma. Numbers have a decimal point.
        client_column: Producer of each example: table column, npz array, or `writer` or `series` of QMNIST's label
            files beside MNIST's (`idx`). Empty where examples have no producer.
        targets: What npz arrays and your own function give beside the inputs, where it is not a class: `values` for
            numbers of shape (N,) or (N, outputs), `mask` for a class of each pixel.
        target_columns: Table columns with the numbers to predict, in place of a class.
        feature_columns: Table columns with the inputs, in this order; absent for all that have no other use.
        time_column: Table column with the time of each row: ISO 8601 or seconds. Rows of one producer must be in order.
        time_format: Format of `time_column` in the notation of Python's `strptime`; absent for ISO 8601 or seconds.
        drop_missing: Cells that stand for a missing number, such as `""`, `NA` or `-200`: rows with one in a feature or
            target are left out. Absent: such rows are an error.
        decimal: `,` where numbers of a CSV file have a decimal comma.
        table: Table or view of an SQLite file; absent where it has only one.
        window: Windows of consecutive rows, each of which is one example; absent for one row each.
        masks: Folder beside the pictures, or below `path`, with a mask for each picture: a picture of the same name
            whose pixel values are the classes.
        size: Height and width to which pictures are resized; absent for pictures of one size.
        mel: Features of sound files; absent for 40 bands of one second at 16 kHz.
        options: Arguments of your own function.
        growing: Whether files grow during a run: they are read again before each task where they have changed, a last
            line that is being written is left for the next task, and examples are held out by hash.
        recent: At most this many examples, the newest ones: the last of a table or array, or the files changed last.
        holdout_by: `hash`: whether an example is held out follows from its name, time or content alone, so that further
            examples never move it into training. Absent: a fixed random draw, or `hash` where files grow.
        normalise: `federated`, in a plan: before round 1, devices send the count, sum and sum of squares of each
            channel of the inputs that they train on; mean and deviation over all devices are recorded with the run,
            sent with every task and written into releases.
    """

    source: str
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
    targets: Literal["values", "mask"] | msgspec.UnsetType = msgspec.UNSET
    target_columns: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    feature_columns: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    time_column: str | msgspec.UnsetType = msgspec.UNSET
    time_format: str | msgspec.UnsetType = msgspec.UNSET
    drop_missing: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    decimal: Literal[",", "."] | msgspec.UnsetType = msgspec.UNSET
    table: str | msgspec.UnsetType = msgspec.UNSET
    window: Window | msgspec.UnsetType = msgspec.UNSET
    masks: str | msgspec.UnsetType = msgspec.UNSET
    size: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET
    mel: Mel | msgspec.UnsetType = msgspec.UNSET
    options: dict[str, Scalar] | msgspec.UnsetType = msgspec.UNSET
    growing: bool | msgspec.UnsetType = msgspec.UNSET
    recent: int | msgspec.UnsetType = msgspec.UNSET
    holdout_by: Literal["hash"] | msgspec.UnsetType = msgspec.UNSET
    normalise: Literal["federated"] | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_custom(self) -> bool:
        """True if the source is a plugin: a function of the user."""
        return self.source not in SOURCE_NAMES

    @property
    def is_held_out_by_hash(self) -> bool:
        """True if an example's identity decides whether it is held out."""
        return self.holdout_by == "hash" or bool(self.growing)

    @property
    def target_kind(self) -> TargetKind:
        """Kind of the targets: a class of each example, numbers, or a class of each pixel."""
        if self.target_columns:
            return "values"
        return "mask" if self.masks else self.targets or "class"

    @property
    def has_classes(self) -> bool:
        """True if the examples have labels, and a label is one class."""
        return self.is_labelled and self.target_kind == "class"

    @property
    def is_labelled(self) -> bool:
        """True if the examples have labels."""
        return not self.labels and self.source != NONE

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
        _require_ranges(self)
        if self.normalise and (self.mean or self.std):
            raise ValueError("normalise measures mean and std; remove them")
        if self.classes is not msgspec.UNSET:
            msgspec.structs.force_setattr(self, "classes", tuple(map(normalise_name, self.classes)))
            require_class_names(self.classes)
        if self.labels and self.drawn:
            raise ValueError('drawn takes examples by their class, and labels = "none" has none: take out one')
        _require_source_keys(self)
        _require_targets(self)
        _require_columns(self)


def _require_ranges(spec: Data) -> None:
    for key in ("holdout", "validation"):
        if not 0 <= (share := getattr(spec, key)) < 1:
            raise ValueError(f"{key} must be in [0, 1), not {share}")
    for key in ("limit", "recent"):
        if (most := getattr(spec, key)) is not None and most is not msgspec.UNSET and most < 1:
            raise ValueError(f"{key} must be >= 1, not {most}; leave it out for all examples")
    if not all(map(math.isfinite, spec.mean)) or not all(0 < deviation < math.inf for deviation in spec.std):
        raise ValueError("mean must be finite, std above zero and finite")


def _require_source_keys(spec: Data) -> None:
    """Refuse a missing path, and keys that the source would ignore; `require_source` checks its name."""
    source = CUSTOM if spec.is_custom else spec.source
    for key, sources in KEY_SOURCES.items():
        if source not in sources and getattr(spec, key) is not msgspec.UNSET:
            raise ValueError(f"{key} means nothing to source {spec.source!r}; remove it")
    if spec.source not in ("digits", NONE) and not spec.is_custom and not spec.path:
        raise ValueError(f"path must name the file or folder that source {spec.source!r} reads")
    if spec.client_column and spec.source in ("digits", "folder", "audio"):
        raise ValueError(f"client_column means nothing to source {spec.source!r}; remove it")
    if spec.size is not msgspec.UNSET and not all(1 <= side <= MAX_SIDE for side in spec.size):
        raise ValueError(f"size must be height and width, 1 to {MAX_SIDE} each, not {list(spec.size)}")


def _require_columns(spec: Data) -> None:
    """Refuse column keys that contradict each other."""
    if spec.separator is not msgspec.UNSET and (len(spec.separator) != 1 or spec.separator in '\r\n"\0'):
        raise ValueError(f'separator must be one character such as ";" or "\\t", not {spec.separator!r}')
    if spec.decimal == "," == (spec.separator or ","):
        raise ValueError('decimal is a comma, as the separator is; set separator, such as ";"')
    used = {spec.client_column, spec.time_column or "", *(spec.target_columns or ())}
    used |= set() if spec.target_columns else {spec.label_column}
    if named := used & set(spec.skip_columns or ()) - {""}:
        raise ValueError(f"skip_columns leaves out {min(named)!r}, which another key names")
    for key in ("target_columns", "feature_columns", "drop_missing"):
        names = getattr(spec, key)
        if names is not msgspec.UNSET and (not names or len(set(names)) < len(names)):
            raise ValueError(f"{key} must be names, each once; or remove it")
    if spec.time_format and not spec.time_column:
        raise ValueError("time_format needs time_column; name the column")
    _require_window(spec)


def _require_window(spec: Data) -> None:
    """Refuse windows whose times are unknown, and targets among the features that would give them away."""
    window, targets = spec.window, set(spec.target_columns or ())
    if window and window.max_gap_s is not msgspec.UNSET and not spec.time_column:
        raise ValueError("window.max_gap_s needs time_column; name the column")
    if window and window.horizon and not targets and spec.is_labelled:
        raise ValueError("window.horizon predicts the numbers of target_columns; name them, or set horizon to 0")
    if not (window and window.horizon) and (leaked := targets & set(spec.feature_columns or ())):
        raise ValueError(f"feature_columns has the target {min(leaked)!r}; only a window with a horizon may know it")


def _require_targets(spec: Data) -> None:
    """Refuse keys that need a class of each example where targets are something else."""
    kind = spec.target_kind
    if kind == "class":
        return
    if kind == "mask" and spec.augment != "none":
        raise ValueError(f"augment {spec.augment!r} would move pictures but not their masks; remove it")
    reason = f"targets are {'numbers' if kind == 'values' else 'masks'}, not classes"
    is_dealt_by_class = isinstance(spec.partition, Dirichlet | Shards)
    if is_dealt_by_class:
        raise ValueError(f"partition deals examples by class, but {reason}; use even or client")
    for key in ("drawn", "without", *(("classes",) if kind == "values" else ())):
        if getattr(spec, key) is not msgspec.UNSET:
            raise ValueError(f"{key} needs classes, but {reason}; remove it")
