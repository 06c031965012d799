"""Checkpoints of the server state, one safetensors file a round, the last few kept; a run's journal beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from edge_server.journal.records import AnyRecord, Journal, Rewound, RoundClosed, RunOpened, measured_rounds
from edge_server.journal.runs import BEST, CHECKPOINTS, FOLDER, best_path, checkpoint_path
from edge_server.journal.sqlite import SqliteJournal
from shared.errors import CorruptFile
from shared.runtime.durable import explain_disk_errors
from shared.tensors import file
from shared.tensors.tree import State

KEEP = 2
SPARE, GOOD = ".spare", "good.safetensors"
"""The file that the next state is written into; and the last state that left the few that are kept: rounds were
aggregated from it, so that it trains."""


class Origin(NamedTuple):
    """What a checkpoint is of, as it says itself.

    Attributes:
        rewinds: How often that run had gone back by then, so that a state that it went back from is not taken for one
            that came later.
    """

    run: str
    round: int
    rewinds: int


def save(
    folder: Path, number: int, state: State, *, durable: bool = True, origin: Origin | None = None, best: int = 0
) -> None:
    """Write the state after a round, then part with those older than the last `KEEP`, and with those of void rounds.

    The newest of the older ones stays as the last good one. Another stays as the file that the next is written into,
    since overwriting costs half of making one.

    Args:
        durable: Whether to wait until it is on the disk.
        origin: What it says of itself.
        best: After which earlier round the model was most accurate; it stays. 0 where nobody knows, or cares.

    Raises:
        Unwritable: The disk is full or cannot be written; older states are untouched.
    """
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_path(folder, number)
        about = origin._asdict() if origin else None
        file.save(path, state, spare=folder / SPARE, durable=durable, about=about)
        kept = sorted(folder.glob(CHECKPOINTS))
        until = kept.index(path) + 1
        for void in kept[until:]:
            void.replace(folder / SPARE)
        for old in kept[: max(0, until - KEEP)]:
            is_best = old == checkpoint_path(folder, best)
            place = best_path(folder, best) if is_best else folder / GOOD
            if place.exists():
                place.replace(folder / SPARE)
            old.replace(place)
        for other in set(folder.glob(BEST)) - {best_path(folder, best)}:
            other.replace(folder / SPARE)


def load(folder: Path, number: int) -> State:
    """Read the state after a round, be it the last good or the most accurate one.

    Raises:
        FileNotFoundError: There is none.
        CorruptFile: It is damaged.
    """
    return file.load(state_path(folder, number))


def state_path(folder: Path, number: int) -> Path:
    """Return where the state after a round lies, or would: as one of the last, the last good or the most accurate."""
    path, best = checkpoint_path(folder, number), best_path(folder, number)
    if path.exists():
        return path
    if good_number(folder) == number:
        return folder / GOOD
    return best if best.exists() else path


def good_number(folder: Path) -> int:
    """Return after which round the last good state is; 0 where there is none, or it cannot be read."""
    try:
        number = file.read_about(folder / GOOD).get("round") if (folder / GOOD).exists() else None
    except CorruptFile:
        return 0
    return number if isinstance(number, int) else 0


def later(folder: Path, origin: Origin) -> list[Origin]:
    """Return the checkpoints of a run that are of a later round than `origin` and that it never went back from.

    Args:
        origin: The run, the last round that its journal knows, and how often it went back by what that says.

    Returns:
        The newest first, the last good and the most accurate among them; whether they can be read is not said.
    """
    found = list[Origin]()
    for path in (*folder.glob(CHECKPOINTS), *folder.glob(GOOD), *folder.glob(BEST)):
        try:
            match file.read_about(path):
                case {"run": str(run), "round": int(number), "rewinds": int(rewinds)} if run == origin.run:
                    found.append(Origin(run, number, rewinds))
        except CorruptFile:
            continue  # what it was of is not known any more: it is set aside when its round is asked for
    newer = [one for one in found if one.round > origin.round and one.rewinds >= origin.rewinds]
    return sorted(newer, reverse=True)


class Store(Journal, Protocol):
    """One run's journal, its checkpoints and its accepted updates."""

    def save(self, number: int, state: State) -> None:
        """Keep the server state after a round, durably. Raises Unwritable, and then nothing has changed."""
        ...

    def load(self, number: int) -> State:
        """Return the state kept after a round. Raises FileNotFoundError or CorruptFile."""
        ...

    def good_number(self) -> int:
        """Return after which round the last good state is, 0 where there is none: a later one may train no more."""
        ...

    def later(self, origin: Origin) -> list[Origin]:
        """Return the states of this run that are of later rounds than that, newest first."""
        ...


class SqliteStore(SqliteJournal):
    """The store on disk: journal, checkpoints and accepted updates in one folder a run."""

    _run: str | None = None
    _keeps_best = False
    _rewinds = 0
    _best: tuple[float, int] = (-math.inf, 0)

    def append(self, record: AnyRecord) -> None:
        super().append(record)
        if isinstance(record, Rewound):
            self._run = None  # the most accurate round may be void: look again
        if isinstance(record, RoundClosed) and record.accuracy is not None:
            self._best = max(self._best, (record.accuracy, record.round))

    def save(self, number: int, state: State) -> None:
        if self._run is None:
            self._recall(self.records())
        origin = Origin(self._run or "", number, self._rewinds)
        best = self._best[1] if self._keeps_best else 0
        save(self.folder / FOLDER, number, state, durable=self.durable, origin=origin, best=best)

    def _recall(self, records: Sequence[AnyRecord]) -> None:
        opened = next((one for one in records if isinstance(one, RunOpened)), None)
        self._run = opened.run if opened else ""
        self._keeps_best = opened is not None and opened.plan.evaluation.keep == "best"
        self._rewinds = sum(isinstance(one, Rewound) for one in records)
        self._best = max(measured_rounds(records), default=(-math.inf, 0))

    def load(self, number: int) -> State:
        return load(self.folder / FOLDER, number)

    def good_number(self) -> int:
        return good_number(self.folder / FOLDER)

    def later(self, origin: Origin) -> list[Origin]:
        return later(self.folder / FOLDER, origin)
