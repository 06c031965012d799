"""Checkpoints of the server state: safetensors files, the latest few retained."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, Protocol

from edge_server.journal.compared import best_round, compared_metric, measured_rounds, server_value
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.records import AnyRecord, Journal, Measured, Rewound, RoundClosed, RunOpened, first, select
from edge_server.journal.runs import BEST, CHECKPOINTS, FOLDER, best_path, checkpoint_path
from edge_server.journal.sqlite import SqliteJournal
from shared.errors import CorruptFile
from shared.protocol.inputs import Inputs
from shared.runtime.durable import explain_disk_errors
from shared.tensors import file
from shared.tensors.tree import State

KEEP = 2
SPARE, GOOD = ".spare", "good.safetensors"
"""The file that the next state is written into; and the newest state older than the retained ones: later rounds were
aggregated from it, so it is known to train.
"""


class Origin(NamedTuple):
    """Provenance of a checkpoint, stored inside it.

    Attributes:
        rewinds: Rewinds of the run by then; tells a state that the run went back from apart from a later one.
        mean, std: Of the inputs, as JSON lists, if devices measured them; without these numbers a model is worthless.
    """

    run: str
    round: int
    rewinds: int
    mean: str = ""
    std: str = ""

    @property
    def moments(self) -> Inputs | None:
        """Measured mean and deviation of the inputs; None if there are none."""
        return Inputs(mean=json.loads(self.mean), std=json.loads(self.std)) if self.mean and self.std else None


def save(
    folder: Path, number: int, state: State, *, durable: bool = True, origin: Origin | None = None, best: int = 0
) -> None:
    """Write the state after a round, then remove those older than the last `KEEP` and those of void rounds.

    The newest of the older ones stays as the last good one. Another becomes the file that the next state overwrites,
    which costs half as much as creating one.

    Args:
        durable: Whether to wait until it is on the disk.
        best: Earlier round with the best model, whose state stays; 0 if unknown or irrelevant.

    Raises:
        Unwritable: The disk is full or cannot be written; older states are untouched.
    """
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_path(folder, number)
        metadata = {name: value for name, value in origin._asdict().items() if value != ""} if origin else None
        file.save(path, state, spare=folder / SPARE, durable=durable, about=metadata)
        _retain(folder, path, best_path(folder, best))


def _retain(folder: Path, newest: Path, best: Path) -> None:
    """Remove states of void rounds and old ones, except the last good one and the best."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    paths = [folder / name for name in names if fnmatchcase(name, CHECKPOINTS)]
    until = paths.index(newest) + 1
    for void in paths[until:]:
        void.replace(folder / SPARE)
    for old in paths[: max(0, until - KEEP)]:
        target = best if old.name.removeprefix("round") == best.name.removeprefix("best") else folder / GOOD
        if target.exists():
            target.replace(folder / SPARE)
        old.replace(target)
    for name in names:
        if fnmatchcase(name, BEST) and name != best.name:
            (folder / name).replace(folder / SPARE)


def load(folder: Path, number: int) -> State:
    """Read the state after a round, including the last good and the most accurate one.

    Raises:
        FileNotFoundError: There is none.
        CorruptFile: It is damaged.
    """
    return file.load(state_path(folder, number))


def state_path(folder: Path, number: int) -> Path:
    """Return the path of the state after a round: a retained, the last good or the most accurate one."""
    path, best = checkpoint_path(folder, number), best_path(folder, number)
    if path.exists():
        return path
    if good_number(folder) == number:
        return folder / GOOD
    return best if best.exists() else path


def good_number(folder: Path) -> int:
    """Return the round of the last good state; 0 if there is none or it cannot be read."""
    try:
        number = file.read_about(folder / GOOD).get("round") if (folder / GOOD).exists() else None
    except CorruptFile:
        return 0
    return number if isinstance(number, int) else 0


def read_origin(path: Path) -> Origin | None:
    """Return the provenance of a checkpoint; None if it does not say.

    Raises:
        CorruptFile: It cannot be read.
    """
    match about := file.read_about(path):
        case {"run": str(run), "round": int(number), "rewinds": int(rewinds)}:
            return Origin(run, number, rewinds, str(about.get("mean", "")), str(about.get("std", "")))
        case _:
            return None


def later_checkpoints(folder: Path, origin: Origin) -> list[Origin]:
    """Return the checkpoints of a run later than `origin` that it never went back from.

    Args:
        origin: The run, the last round in its journal and the rewinds recorded there.

    Returns:
        The newest first, the last good and the most accurate among them; they may be unreadable.
    """
    origins = list[Origin]()
    for path in (*folder.glob(CHECKPOINTS), *folder.glob(GOOD), *folder.glob(BEST)):
        try:
            stored = read_origin(path)
        except CorruptFile:
            continue  # what it was of is not known any more: it is set aside when its round is asked for
        if stored and stored.run == origin.run:
            origins.append(stored)
    newer = [other for other in origins if other.round > origin.round and other.rewinds >= origin.rewinds]
    return sorted(newer, reverse=True)


class Store(Journal, Protocol):
    """A run's journal, checkpoints and accepted updates."""

    def save(self, number: int, state: State) -> None:
        """Store the server state after a round durably. Raises Unwritable, and then nothing has changed."""
        ...

    def load(self, number: int) -> State:
        """Return the state after a round. Raises FileNotFoundError or CorruptFile."""
        ...

    def good_number(self) -> int:
        """Return the round of the last good state, 0 if there is none; later ones may have diverged."""
        ...

    def later(self, origin: Origin) -> list[Origin]:
        """Return the states of this run that are of later rounds, newest first."""
        ...


class SqliteStore(SqliteJournal):
    """Store on disk: journal, checkpoints and accepted updates in one folder per run."""

    _run: str | None = None
    _keeps_best = False
    _rewinds = 0
    _moments = "", ""
    _metric = ACCURACY
    _best: tuple[float, int] | None = None

    def extend(
        self, records: Sequence[AnyRecord], payloads: Mapping[str, bytes] = {}, *, may_wait: bool = False
    ) -> None:
        super().extend(records, payloads, may_wait=may_wait)
        for record in records:
            if isinstance(record, Rewound | Measured):
                self._run = None  # the best round may be void, and the inputs be measured: look again
            if isinstance(record, RoundClosed) and (value := server_value(record, self._metric)) is not None:
                self._best = best_round([*([self._best] if self._best else []), (value, record.round)], self._metric)

    def save(self, number: int, state: State) -> None:
        if self._run is None:
            self._recall(self.records())
        mean, std = self._moments
        origin = Origin(self._run or "", number, self._rewinds, mean, std)
        best = self._best[1] if self._keeps_best and self._best else 0
        save(self.folder / FOLDER, number, state, durable=self.durable, origin=origin, best=best)

    def _recall(self, records: Sequence[AnyRecord]) -> None:
        opening = first(records, RunOpened)
        self._run = opening.run if opening else ""
        self._keeps_best = opening is not None and opening.plan.evaluation.keep == "best"
        self._rewinds = sum(1 for _ in select(records, Rewound))
        self._metric = compared_metric(records)
        self._best = best_round(measured_rounds(records), self._metric)
        inputs = [record.inputs for record in select(records, Measured) if record.inputs]
        self._moments = (json.dumps(inputs[-1].mean), json.dumps(inputs[-1].std)) if inputs else ("", "")

    def load(self, number: int) -> State:
        return load(self.folder / FOLDER, number)

    def good_number(self) -> int:
        return good_number(self.folder / FOLDER)

    def later(self, origin: Origin) -> list[Origin]:
        return later_checkpoints(self.folder / FOLDER, origin)
