"""Result of a data check and its drift since the last one, without numpy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.runtime.durable import replace_file

FILE_NAME = "data-check.json"
"""File in the agent's `state_dir`."""
MAX_DAMAGED, MAX_CHANNELS, MAX_TARGETS = 20, 64, 64
LARGE_INPUT_DRIFT, LARGE_TARGET_DRIFT = 0.5, 0.2
"""Drift from which on a warning is printed."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Change since an earlier check.

    Attributes:
        since: Calendar time of that check.
        examples: Examples more than then.
        inputs: Largest shift of a channel's mean, in standard deviations of then.
        targets: Of classes, the share of examples that would have to change class (total variation); of numbers, the
            largest shift of a median, in interquartile ranges of then. None where there are no targets to compare.
    """

    since: str
    examples: int
    inputs: float
    targets: float | None = None


class DataCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a device's examples.

    Attributes:
        at: Calendar time of the check.
        examples: Examples read; `is_whole` if these are all.
        shape: Shape of one input.
        mean: Mean of each channel, at most `MAX_CHANNELS`.
        std: Standard deviation of each channel, likewise.
        classes: Examples of each class by name or number; of masks, pixels.
        quantiles: Minimum, quartiles and maximum of each numeric target by name.
        training: Examples to train on.
        held_out: Examples held out for evaluation.
        damaged: Messages about damaged files, at most `MAX_DAMAGED`.
        num_damaged: Number of damaged files.
        notes: Likely mistakes in examples that can be trained on, a line each.
        drift: Change since the last check; None for the first one.
    """

    at: str = ""
    examples: int
    is_whole: bool
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: dict[str, int] = {}
    quantiles: dict[str, tuple[float, ...]] = {}
    training: int = 0
    held_out: int = 0
    damaged: tuple[str, ...] = ()
    num_damaged: int = 0
    notes: tuple[str, ...] = ()
    drift: Drift | None = None

    def summary(self) -> str:
        """Return one line for the fleet's view."""
        parts = [f"{'' if self.is_whole else 'more than '}{self.examples} examples"]
        parts += [f"{len(self.classes)} classes"] if self.classes else []
        parts += [f"{self.num_damaged} damaged files"] if self.num_damaged else []
        if self.drift:
            targets = "" if self.drift.targets is None else f", {self.drift.targets:.2f} of targets"
            parts.append(f"drift {self.drift.inputs:.2f} of inputs{targets}")
        return f"{', '.join(parts)} ({self.at})"


def compare(check: DataCheck, before: DataCheck) -> Drift:
    """Return the drift of a check since an earlier one; compare only what both have."""
    shifts = [
        abs(mean - old_mean) / std
        for mean, old_mean, std in zip(check.mean, before.mean, before.std, strict=False)
        if std > 0 and check.shape == before.shape
    ]
    targets: list[float] = []
    if check.classes and before.classes:
        targets = [_total_variation(check.classes, before.classes)]
    for name in check.quantiles.keys() & before.quantiles.keys():
        _, low, median, high, _ = before.quantiles[name]
        if high > low:
            targets.append(abs(check.quantiles[name][2] - median) / (high - low))
    return Drift(
        since=before.at,
        examples=check.examples - before.examples,
        inputs=max(shifts, default=0.0),
        targets=max(targets) if targets else None,
    )


def _total_variation(counts: Mapping[str, int], others: Mapping[str, int]) -> float:
    total, other_total = sum(counts.values()), sum(others.values())
    names = counts.keys() | others.keys()
    return sum(abs(counts.get(name, 0) / total - others.get(name, 0) / other_total) for name in names) / 2


def read_check(state_dir: Path) -> DataCheck | None:
    """Read the last check; None if there is none, or it is damaged or of another version."""
    try:
        return msgspec.json.decode((state_dir / FILE_NAME).read_bytes(), type=DataCheck)
    except (OSError, msgspec.MsgspecError):
        return None


def store_check(state_dir: Path, check: DataCheck) -> None:
    """Store a check for the agent's reports and the next comparison.

    Raises:
        ConfigError: This user cannot write to the folder.
    """
    try:
        with contextlib.suppress(FileExistsError):
            state_dir.mkdir(parents=True)
        replace_file(state_dir / FILE_NAME, msgspec.json.encode(check), durable=False)
    except OSError as error:
        raise ConfigError(f"{state_dir}: the check cannot be stored ({error}); run it as the agent's user") from error
