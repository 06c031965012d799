"""Resume a run from its journal and checkpoints; load its trained network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import Origin, Store
from edge_server.journal.records import (
    AnyRecord,
    Measured,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunOpened,
    UpdateAccepted,
    enumerate_valid,
    first,
    select,
    valid_records,
)
from edge_server.journal.runs import FOLDER, StoredRun, best_path
from edge_server.learner import plan_algorithm
from shared.algorithms.base import join_network
from shared.errors import ConfigError, CorruptFile
from shared.models.base import Model
from shared.models.build import build_blank
from shared.protocol import payload
from shared.tensors import file
from shared.tensors.tree import State, Tree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """Position of a run: state, next round, and the finished part of that round."""

    state: State
    number: int
    open_round: RoundOpened | None
    accepted: dict[str, UpdateAccepted]


def resume(store: Store, init: Callable[[], State], *, split: bool = False) -> Resumption:
    """Return the position at which a run continues.

    A lost checkpoint sends the run back to the one before; a lost end of the journal does not. An open round of a split
    algorithm restarts with the same assignments: its served steps are in no checkpoint, and their updates must not
    count.

    Args:
        init: Creates the first state.
        split: Whether the algorithm is split.
    """
    _restore_lost_rounds(store)
    while True:
        number, aggregated = 1, 0
        for record in valid_records(store.records(), RoundClosed):
            number = max(number, record.round + 1)
            aggregated = record.round if record.outcome == "aggregated" else aggregated
        try:
            state = store.load(aggregated) if aggregated else init()
        except (CorruptFile, FileNotFoundError) as error:
            cause = str(error)
            if isinstance(error, CorruptFile):
                aside = file.set_aside(checkpoints.state_path(store.folder / FOLDER, aggregated))
                cause += f"; set aside as {aside.name}"
            log.warning("going back to before round %d: %s", aggregated, cause)
            store.append(Rewound(round=aggregated, cause=cause))
            continue
        if number > 1:
            log.info("resuming with round %d", number)
        open_round, accepted = _find_open_round(store, store.records(), number)
        if split and open_round:
            cause = "the server restarted, and with it went the top that this round had trained"
            store.append(Rewound(round=number, cause=cause, reopened=True))
            accepted = {}
        return Resumption(state, number, open_round, accepted)


def _restore_lost_rounds(store: Store) -> None:
    """Record rounds missing from the journal, by the newest intact state later than all journalled rounds.

    The end of a journal is lost if a disk acknowledged data that it had not written. A round whose opening is recorded
    is not lost: it continues from the state before it, as after any restart.
    """
    records = store.records()
    opening, rewinds = first(records, RunOpened), sum(1 for _ in select(records, Rewound))
    last_closed = before = 0
    for record in valid_records(records, RoundClosed):
        last_closed = max(last_closed, record.round)
        before = max(before, record.round) if record.outcome == "aggregated" else before
    journal_end = Origin(opening.run if opening else "", last_closed, rewinds)
    newest = next((origin for origin in store.later(journal_end) if _load_state(store, origin.round)), None)
    if newest is None:
        return
    open_numbers = {record.round for record in valid_records(records, RoundOpened)}
    first_lost, last = journal_end.round + 1, newest.round
    if last == first_lost and first_lost in open_numbers and (not before or _load_state(store, before)):
        return
    lost = f"rounds {first_lost} to {last}" if last > first_lost else f"round {last}"
    what = (
        f"the journal has lost its end: {lost} not recorded, but the model after round {last} is intact; "
        "the run resumes there"
    )
    log.warning("%s", what)
    is_measured = first(records, Measured) is not None
    store.extend(
        [
            Noted(what=what),
            *([Measured(by_device={}, inputs=newest.moments)] if newest.moments and not is_measured else []),
            RoundClosed(round=newest.round, outcome="aggregated", arrived=(), seconds=0.0, restored=True),
        ]
    )


def _load_state(store: Store, number: int) -> State | None:
    try:
        return store.load(number)
    except (CorruptFile, FileNotFoundError):
        return None


def _find_open_round(
    store: Store, records: Sequence[AnyRecord], number: int
) -> tuple[RoundOpened | None, dict[str, UpdateAccepted]]:
    """Return the opening of a round that has not ended, and its stored updates."""
    openings = [entry for entry in enumerate_valid(records, RoundOpened) if entry[1].round == number]
    if not openings:
        return None, {}
    accepted = {
        record.device: record
        for record in valid_records(records[openings[0][0] :], UpdateAccepted)
        if record.round == number and _is_stored(store, record)
    }
    return openings[-1][1], accepted


def _is_stored(store: Store, record: UpdateAccepted) -> bool:
    """Return true if an accepted update is still intact on disk; a damaged one is requested again."""
    params = record.update.params
    with suppress(FileNotFoundError):
        if params is None or payload.digest([store.read_payload(record.device, params)]) == params.digest:
            return True
    log.warning("the stored update of %s in round %d is damaged, requesting it again", record.device, record.round)
    return False


def load_trained_network(run: StoredRun, number: int = 0) -> tuple[Model, Tree]:
    """Return a run's network, without storage, and its trained parameters.

    Args:
        number: The round after which; 0 for the last that changed the model.

    Raises:
        ConfigError: There is no such round or stored state, or a part of the network is on the devices.
        CorruptFile: The state is damaged.
    """
    changed = [record.round for record in valid_records(run.records, RoundClosed) if record.outcome == "aggregated"]
    if run.opened is None or not changed or (number and number not in changed):
        raise ConfigError(f"{run.folder}: no round {number or 'at all'} has changed its model")
    after, folder, plan = number or changed[-1], run.folder / FOLDER, run.opened.plan
    paths = (checkpoints.state_path(folder, after), best_path(folder, after))
    path = next((candidate for candidate in paths if candidate.exists()), None)
    if path is None:
        stored = "the last, and the most accurate where the plan says so"
        raise ConfigError(f"{folder}: keeps no state after round {after}; there are those after {stored}")
    model = build_blank(plan.model)
    return model, join_network(plan_algorithm(plan), model, file.load(path))
