"""Begin rollouts of a site, and give orders to them.

A site has at most one active rollout. The process that runs it holds the lock of the rollouts' folder; other processes
give orders through its journal. If no process runs it, the one that gives the order does.
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
    read_model_statuses,
    read_rollout,
    rollout_names,
)
from edge_server.journal.rollouts.state import RolloutState, fold
from edge_server.plan.data_folder import claim_data_folder
from edge_server.release.rollout.agents import StoredAgent
from edge_server.release.store import StoredRelease
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import parse_reference, require_class_names
from shared.protocol.inference.rollout import MOST_MANIFEST_BYTES
from shared.protocol.update import PENDING
from shared.runtime.clock import utc_stamp
from shared.runtime.folder_lock import FolderLock

MAX_NAMED = 8


class LoadedRollout(NamedTuple):
    """A rollout's journal and the state folded from it."""

    journal: RolloutJournal
    state: RolloutState


def open_rollout(data_dir: Path, deployment: str = "") -> LoadedRollout:
    """Open a rollout, the latest if `deployment` is empty.

    Raises:
        ConfigError: No such rollout exists.
        CorruptFile: Its journal is damaged.
    """
    names = rollout_names(data_dir)
    if not deployment and not names:
        raise ConfigError(f"no rollout in {data_dir / FOLDER}; `edge-server rollout start` begins one")
    name = deployment or names[-1]
    if name not in names:
        read_rollout(data_dir, name)  # raises an error that lists the existing ones
    journal = RolloutJournal(data_dir, name)
    state = fold(journal.news())
    if state is None:
        raise CorruptFile(f"{journal.path}: the first record, with the rollout's plan, is missing; remove the file")
    return LoadedRollout(journal, state)


def begin_rollout(data_dir: Path, stored: StoredRelease | StoredAgent, terms: RolloutPlan) -> LoadedRollout:
    """Create a rollout's journal with its first record.

    Args:
        terms: Its names and attempt number are replaced.

    Raises:
        ConfigError: Another rollout is active, the release cannot be offered, or a newer fieldfleet wrote there.
        CorruptFile: A part of the release is damaged.
        Unwritable: The disk is full.
    """
    stored.verify_parts()
    if isinstance(stored, StoredRelease):
        require_class_names(stored.manifest)
    size = len(stored.content())
    if size > MOST_MANIFEST_BYTES:
        raise ConfigError(f"release {stored.manifest.reference}: a manifest of {size} bytes is more than one message")
    earlier = require_no_active_rollout(data_dir)
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
    return LoadedRollout(journal, state)


def require_no_active_rollout(data_dir: Path) -> list[RolloutState]:
    """Require that all earlier rollouts are over, and return them.

    Raises:
        ConfigError: A rollout is active.
        CorruptFile: A journal is damaged.
    """
    earlier = [state for name in rollout_names(data_dir) if (state := fold(read_rollout(data_dir, name)))]
    for state in earlier:
        if state.outcome is None:
            raise ConfigError(
                f"rollout {state.plan.deployment} of {state.plan.release} is under way ({state.mode}): "
                "`edge-server rollout resume` continues it, `abort` or `back` ends it"
            )
    return earlier


def _next_number(data_dir: Path) -> int:
    numbers = (name.partition("-")[0] for name in rollout_names(data_dir))
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)


def give_order(rollout: LoadedRollout, order: Order) -> None:
    """Append an order to a rollout's journal unless it has no effect.

    Raises:
        ConfigError: The rollout is over, so it cannot be paused, resumed or aborted.
        Unwritable: The disk is full.
    """
    state, name = rollout.state, rollout.state.plan.deployment
    is_over = state.outcome is not None
    if order == "abort" and state.mode == "aborted" and (state.behind or not is_over):
        return  # continue an abort whose process was killed, or repeat it for boards that were offline
    if (order in ("pause", "abort") and is_over) or state.mode == "aborted":
        raise ConfigError(
            f"rollout {name} is over ({state.outcome or state.mode}); `edge-server rollout start` begins one"
        )
    if order == "resume" and (state.mode in ("going", "going-back")):
        return
    for record in rollout.journal.append(RolloutOrdered(at=utc_stamp(), order=order)):
        state.apply(record)


def is_driven(data_dir: Path) -> bool:
    """Check whether a process is running a rollout in this folder."""
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


def boards_using(data_dir: Path, reference: str) -> list[str]:
    """List the boards that serve the release `NAME/VERSION` or are about to, by their last recorded status."""
    name, version = parse_reference(reference)
    devices = []
    for device, models in sorted(read_model_statuses(data_dir).items()):
        if (status := models.get(name)) is None:
            continue
        under_way = status.state in PENDING | {"trial"} and status.candidate == version
        if status.committed == version or under_way:
            devices.append(device)
    return devices


def require_unused(data_dir: Path, reference: str) -> None:
    """Reject the deletion of the release `NAME/VERSION` if boards or an active rollout use it.

    Raises:
        ConfigError: The release is in use.
    """
    if boards := boards_using(data_dir, reference):
        more = f" and {len(boards) - MAX_NAMED} more" if len(boards) > MAX_NAMED else ""
        raise ConfigError(
            f"release {reference} is used by {', '.join(boards[:MAX_NAMED])}{more}: "
            "roll another release out to them first, or add --force if these boards no longer exist"
        )
    for name in rollout_names(data_dir):
        state = fold(read_rollout(data_dir, name))
        if state and state.outcome is None and state.plan.release == reference:
            raise ConfigError(
                f"release {reference} is in use by the active rollout {name}; `edge-server rollout abort` ends it"
            )
