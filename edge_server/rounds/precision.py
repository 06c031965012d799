"""Notes on devices that train in 32 bits although the plan asks for 16."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from edge_server.journal.records import AnyRecord, Noted, select
from edge_server.plan.plan import Plan
from edge_server.rounds.collect_updates import Gather
from shared.tensors.mixed_precision import PRECISION_BITS

log = logging.getLogger(__name__)

REASON = "precision"
FULL_BITS = 32


def noted_devices(records: Sequence[AnyRecord]) -> set[str]:
    """Return the devices with such a note."""
    return {record.device for record in select(records, Noted) if record.reason == REASON}


def note_full_precision(plan: Plan, gather: Gather, noted: set[str]) -> list[Noted]:
    """Return and log a note for each device whose update was trained in 32 bits; none where the plan asks for these.

    Args:
        noted: Devices that have a note; those of this round are added.
    """
    precision, notes = plan.hyper.step.precision, []
    for device, record in sorted(gather.accepted.items()):
        if record.update.metrics.get(PRECISION_BITS) == FULL_BITS and device not in noted:
            noted.add(device)
            what = f"{device} ({record.update.trained_on}) does not compute in {precision} and trains in float32"
            log.warning("%s", what)
            notes.append(Noted(what=what, reason=REASON, device=device))
    return notes
