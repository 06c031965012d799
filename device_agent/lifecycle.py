"""What a device does with a task, as a table. Delivery of updates runs beside it and is not part of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

log = logging.getLogger(__name__)

Phase: TypeAlias = Literal["idle", "fetching", "training"]
Event: TypeAlias = Literal["task", "fetched", "committed", "failed", "superseded"]

TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    "idle": {"task": "fetching"},
    "fetching": {"fetched": "training", "committed": "idle", "failed": "idle", "superseded": "idle"},
    "training": {"committed": "idle", "failed": "idle", "superseded": "idle"},
}


def follow(phase: Phase, event: Event) -> Phase:
    """Return the phase after an event.

    Raises:
        ValueError: The table knows no such event in this phase: a fault of ours.
    """
    following = TRANSITIONS[phase].get(event)
    if following is None:
        raise ValueError(f"event {event!r} while {phase}")
    log.debug("phase %s", following)
    return following
