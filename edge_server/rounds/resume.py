"""Where a run stands, told by its journal and its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import Store
from edge_server.journal.records import AnyRecord, Rewound, RoundClosed, RoundOpened, UpdateAccepted, valid
from shared.errors import CorruptFile
from shared.protocol import payload
from shared.tensors import file
from shared.tensors.tree import State
from shared.transfer import to_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """Where a run stands: the state, the next round, and what of that round is done."""

    state: State
    number: int
    opened: RoundOpened | None
    accepted: dict[str, UpdateAccepted]


def resume(store: Store, init: Callable[[], State], *, split: bool = False) -> Resumption:
    """Find out where a run stands; a lost checkpoint sends it back to the one before.

    An open round of a split method begins anew, with what its devices were told: the steps of it that were served
    are in no checkpoint, and updates that belong to them must not count.

    Args:
        store: The run's.
        init: Makes the first state.
        split: Whether the method is a split one.
    """
    while True:
        records = valid(store.records())
        closed = [record for record in records if isinstance(record, RoundClosed)]
        number = max((record.round for record in closed), default=0) + 1
        aggregated = [record.round for record in closed if record.outcome == "aggregated"]
        try:
            state = store.load(aggregated[-1]) if aggregated else init()
        except (CorruptFile, FileNotFoundError) as error:
            cause = str(error)
            if isinstance(error, CorruptFile):
                aside = file.set_aside(checkpoints.checkpoint_path(store.folder / "checkpoints", aggregated[-1]))
                cause += f"; set aside as {aside.name}"
            log.warning("going back to before round %d: %s", aggregated[-1], cause)
            store.append(Rewound(round=aggregated[-1], cause=cause))
            continue
        if number > 1:
            log.info("going on with round %d", number)
        opened, accepted = _open_round(store.updates, records, number)
        if split and opened:
            cause = "the server restarted, and with it went the top that this round had trained"
            store.append(Rewound(round=number, cause=cause, reopened=True))
            accepted = {}
        return Resumption(state, number, opened, accepted)


def _open_round(
    folder: Path, records: list[AnyRecord], number: int
) -> tuple[RoundOpened | None, dict[str, UpdateAccepted]]:
    """Return the beginning of a round that has not ended, and the updates of it that are stored."""
    opened = [record for record in records if isinstance(record, RoundOpened) and record.round == number]
    accepted = {
        record.device: record
        for record in records
        if isinstance(record, UpdateAccepted) and record.round == number and _is_stored(folder, record)
    }
    return (opened[-1], accepted) if opened else (None, {})


def _is_stored(folder: Path, record: UpdateAccepted) -> bool:
    """Tell whether an accepted update is still there as it was sent; one that has rotted is asked for again."""
    path, params = folder / record.device, record.update.params
    if params is None or (path.exists() and payload.digest([to_file.view(path)]) == params.digest):
        return True
    log.warning("the stored update of %s in round %d is damaged, asking for it again", record.device, record.round)
    return False
