"""Where a run stands, told by its journal and its checkpoints, and the network that it has trained so far."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import Origin, Store
from edge_server.journal.records import (
    AnyRecord,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunOpened,
    UpdateAccepted,
    closed_rounds,
    valid,
)
from edge_server.journal.runs import FOLDER, Run, best_path
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import join_network
from shared.errors import ConfigError, CorruptFile
from shared.models.base import Model
from shared.models.build import blank
from shared.protocol import payload
from shared.registry import build
from shared.tensors import file
from shared.tensors.tree import State, Tree
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
    """Find out where a run stands; a lost checkpoint sends it back to the one before, a lost end of its journal not.

    An open round of a split method begins anew, with what its devices were told: the steps of it that were served
    are in no checkpoint, and updates that belong to them must not count.

    Args:
        init: Makes the first state.
        split: Whether the method is a split one.
    """
    _take_up_lost_rounds(store)
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
                aside = file.set_aside(checkpoints.state_path(store.folder / FOLDER, aggregated[-1]))
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


def _take_up_lost_rounds(store: Store) -> None:
    """Record rounds whose record is lost, by the newest intact state that is later than all that the journal knows.

    The end of a journal is lost where a disk acknowledged what it had not written. A round whose opening is there is
    no lost one: from the state before it, it is done to its end as after any restart.
    """
    records = store.records()
    run = next((one.run for one in records if isinstance(one, RunOpened)), "")
    closed = closed_rounds(records)
    known = Origin(run, max((one.round for one in closed), default=0), sum(isinstance(one, Rewound) for one in records))
    found = next((one for one in store.later(known) if _state_after(store, one.round)), None)
    if found is None:
        return
    opened = {one.round for one in valid(records) if isinstance(one, RoundOpened)}
    before = max((one.round for one in closed if one.outcome == "aggregated"), default=0)
    if found.round == known.round + 1 and found.round in opened and (not before or _state_after(store, before)):
        return
    lost = f"rounds {known.round + 1} to {found.round}" if found.round > known.round + 1 else f"round {found.round}"
    what = (
        f"the journal has lost its end: of {lost} nothing is recorded, but the model after round {found.round} is "
        "whole; the run goes on from there"
    )
    log.warning("%s", what)
    store.extend(
        [
            Noted(what=what),
            RoundClosed(round=found.round, outcome="aggregated", arrived=(), seconds=0.0, restored=True),
        ]
    )


def _state_after(store: Store, number: int) -> State | None:
    try:
        return store.load(number)
    except (CorruptFile, FileNotFoundError):
        return None


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


def trained_network(run: Run, number: int = 0) -> tuple[Model, Tree]:
    """Return the network that a run has trained, without storage, and its parameters: what `show` says the score of.

    Args:
        run: Its folder and its journal.
        number: After which round; 0 for the last that changed it.

    Raises:
        ConfigError: It has no such round, no state of that is kept, or a part of the network is on the devices.
        CorruptFile: That state is damaged.
    """
    changed = [one.round for one in closed_rounds(run.records) if one.outcome == "aggregated"]
    if run.opened is None or not changed or (number and number not in changed):
        raise ConfigError(f"{run.folder}: no round {number or 'at all'} has changed its model")
    after, folder, plan = number or changed[-1], run.folder / FOLDER, run.opened.plan
    paths = (checkpoints.state_path(folder, after), best_path(folder, after))
    path = next((one for one in paths if one.exists()), None)
    if path is None:
        kept = "the last, and the most accurate where the plan says so"
        raise ConfigError(f"{folder}: keeps no state after round {after}; there are those after {kept}")
    model = blank(plan.model)
    return model, join_network(build(ALGORITHMS, plan.algorithm, "algorithm"), model, file.load(path))
