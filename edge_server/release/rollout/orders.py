"""Rollouts of a site from the outside: begin one, find it, give it orders, say which boards use a release.

One rollout of a site is under way at a time. The process that drives it holds the folder of rollouts; others give it
orders through its journal. Where nobody drives it, whoever gives the order does.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_server.journal.rollouts.file import (
    FOLDER,
    Order,
    RolloutJournal,
    RolloutOrdered,
    RolloutPlan,
    RolloutStarted,
    boards_of_models,
    read_rollout,
    rollout_names,
)
from edge_server.journal.rollouts.state import PENDING, RolloutState, fold
from edge_server.plan.data_folder import claim_data_folder
from edge_server.release.rollout.agents import StoredAgent
from edge_server.release.store import StoredRelease
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import parse_reference, require_class_names
from shared.protocol.inference.rollout import MOST_MANIFEST_BYTES
from shared.runtime.clock import utc_stamp
from shared.runtime.folder_lock import FolderLock

MOST_NAMED = 8


class KnownRollout(NamedTuple):
    """A rollout as its journal has it."""

    journal: RolloutJournal
    state: RolloutState


def open_rollout(data_dir: Path, deployment: str = "") -> KnownRollout:
    """Return a rollout, the one that was begun last where none is named.

    Raises:
        ConfigError: There is none.
        CorruptFile: Its journal is damaged.
    """
    names = rollout_names(data_dir)
    if not deployment and not names:
        raise ConfigError(f"there was no rollout in {data_dir / FOLDER}; `edge-server rollout start` begins one")
    name = deployment or names[-1]
    if name not in names:
        read_rollout(data_dir, name)  # says which there are
    journal = RolloutJournal(data_dir, name)
    state = fold(journal.news())
    if state is None:
        raise CorruptFile(f"{journal.path}: it does not say what it is of; remove it")
    return KnownRollout(journal, state)


def begin_rollout(data_dir: Path, stored: StoredRelease | StoredAgent, terms: RolloutPlan) -> KnownRollout:
    """Write a new rollout's first record.

    Args:
        terms: What it is to do; its names and attempt do not count.

    Raises:
        ConfigError: Another one is under way, the release cannot be offered, or a newer version wrote there.
        CorruptFile: A part of the release is damaged.
        Unwritable: The disk takes nothing more.
    """
    stored.require_whole()
    if isinstance(stored, StoredRelease):
        require_class_names(stored.manifest)
    size = len(stored.content())
    if size > MOST_MANIFEST_BYTES:
        raise ConfigError(f"release {stored.manifest.reference}: a manifest of {size} bytes is more than one message")
    earlier = require_none_under_way(data_dir)
    claim_data_folder(data_dir)
    plan = msgspec.structs.replace(
        terms,
        deployment=f"{_next_number(data_dir):04d}-{stored.manifest.name[:32]}-{stored.manifest.version}-{secrets.token_hex(2)}",
        release=stored.manifest.reference,
        sha256=stored.sha256,
        run=stored.run,
        attempt=1 + sum(state.plan.sha256 == stored.sha256 for state in earlier),
    )
    journal = RolloutJournal(data_dir, plan.deployment)
    state = fold(journal.append(RolloutStarted(at=utc_stamp(), plan=plan)))
    assert state
    return KnownRollout(journal, state)


def require_none_under_way(data_dir: Path) -> list[RolloutState]:
    """Return the rollouts that were, all of which must be over.

    Raises:
        ConfigError: One is not.
        CorruptFile: A journal is damaged.
    """
    earlier = [state for name in rollout_names(data_dir) if (state := fold(read_rollout(data_dir, name)))]
    for state in earlier:
        if state.outcome is None:
            raise ConfigError(
                f"rollout {state.plan.deployment} of {state.plan.release} is under way ({state.mode}): "
                "`edge-server rollout resume` goes on with it, `abort` or `back` ends it"
            )
    return earlier


def _next_number(data_dir: Path) -> int:
    numbers = (name.partition("-")[0] for name in rollout_names(data_dir))
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)


def give_order(rollout: KnownRollout, order: Order) -> None:
    """Write an order down, if it makes sense.

    Args:
        order: What is ordered.

    Raises:
        ConfigError: It does not.
        Unwritable: The disk takes nothing more.
    """
    state, name = rollout.state, rollout.state.plan.deployment
    is_over = state.outcome is not None
    if order == "abort" and state.mode == "aborted" and (state.behind or not is_over):
        return  # it goes on: who drove it was killed, or boards that were away are to hear of it
    if (order in ("pause", "abort") and is_over) or state.mode == "aborted":
        raise ConfigError(
            f"rollout {name} is over ({state.outcome or state.mode}); `edge-server rollout start` begins one"
        )
    if order == "resume" and (state.mode in ("going", "going-back")):
        return
    for record in rollout.journal.append(RolloutOrdered(at=utc_stamp(), order=order)):
        state.apply(record)


def is_driven(data_dir: Path) -> bool:
    """Tell whether a process drives rollouts there now."""
    folder = data_dir / FOLDER
    if not folder.is_dir():
        return False
    lock = FolderLock(folder)
    try:
        lock.take()
    except ConfigError:
        return True
    finally:
        lock.release()
    return False


def boards_with(data_dir: Path, reference: str) -> list[str]:
    """Return the boards that serve a release, or are about to, as far as rollouts heard of them.

    Args:
        reference: `NAME/VERSION`.
    """
    name, version = parse_reference(reference)
    devices = []
    for device, models in sorted(boards_of_models(data_dir).items()):
        if (status := models.get(name)) is None:
            continue
        under_way = status.state in PENDING | {"trial"} and status.candidate == version
        if status.committed == version or under_way:
            devices.append(device)
    return devices


def require_unused(data_dir: Path, reference: str) -> None:
    """Refuse to part with a release that boards use, or that a rollout under way is of.

    Args:
        reference: `NAME/VERSION`.

    Raises:
        ConfigError: One does.
    """
    if boards := boards_with(data_dir, reference):
        more = f" and {len(boards) - MOST_NAMED} more" if len(boards) > MOST_NAMED else ""
        raise ConfigError(
            f"release {reference} is used by {', '.join(boards[:MOST_NAMED])}{more}: "
            "roll another one out to them before, or add --force where these boards are no more"
        )
    for name in rollout_names(data_dir):
        state = fold(read_rollout(data_dir, name))
        if state and state.outcome is None and state.plan.release == reference:
            raise ConfigError(
                f"release {reference}: rollout {name} of it is under way; `edge-server rollout abort` ends it"
            )
