"""Journal of a running rollout and the state folded from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_server.journal.rollouts.file import AnyRolloutRecord, RolloutJournal
from edge_server.journal.rollouts.state import RolloutState
from shared.runtime.executor import Worker


@dataclass
class RecordLog:
    """Collects records, and writes them before the next decision.

    Attributes:
        worker: Runs blocking file access.
        on_record: Called with the new state for each appended record.
        changed: Set on every change that may require a decision.
    """

    journal: RolloutJournal
    state: RolloutState
    worker: Worker
    on_record: Callable[[RolloutState, AnyRolloutRecord], None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: list[AnyRolloutRecord] = field(default_factory=list)

    def add(self, record: AnyRolloutRecord) -> None:
        """Add a record, which the next write stores."""
        self._pending.append(record)
        self.changed.set()

    async def write(self, *records: AnyRolloutRecord) -> None:
        """Append pending and new records, and apply orders that other processes appended.

        Raises:
            CorruptFile: The journal is damaged.
            Unwritable: The disk is full.
        """
        is_first = True
        while is_first or self._pending:  # records that arrive during the write must precede the next decision
            written = [*self._pending, *(records if is_first else ())]
            self._pending, is_first = [], False
            call = self.worker(self.journal.append, *written) if written else self.worker(self.journal.news)
            for record in await call:
                self.state.apply(record)
                self.on_record(self.state, record)
