"""Wait for a round's quorum or deadline; leave out devices that stay silent."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from edge_server.journal.records import LeftOut, Noted
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.collect_updates import Gather
from shared.tensors.counts import ceil_share

log = logging.getLogger(__name__)


def updates_needed(tasks: int, *, size: int, quorum: float) -> int:
    """Return the number of updates that ends a round at once.

    Args:
        tasks: Number of devices with a task.
        size: Cohort size without over-selection; 0 for all devices.
        quorum: Required share of the cohort.
    """
    return ceil_share(quorum, min(size, tasks) if size else tasks)


@dataclass
class QuorumWait:
    """The wait for one round's updates.

    Attributes:
        what: Name of the round in log messages.
    """

    run: ActiveRun
    gather: Gather
    what: str
    _spared: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Record each device's message count; call before any task is sent."""
        silent, fleet = self.run.membership.silent, self.run.server.fleet
        self._spared = silent.find_silent(fleet, self.gather.expected)
        silent.begin(fleet, self.gather.expected, self.run.server.clock())

    async def until_quorum(self, *, size: int | None) -> None:
        """Wait; a deadline during which the broker or the disk was unavailable starts again.

        Args:
            size: Cohort size without over-selection, 0 for all devices with a task; None to wait for every device,
                ignoring the quorum.
        """
        while not await self._has_passed(size):
            pass

    async def _has_passed(self, size: int | None) -> bool:
        """Wait for at most one deadline; return true if the round is over."""
        gather = self.gather
        try:
            async with asyncio.timeout(self.run.plan.round.deadline_s):
                while not self._is_enough(size):
                    gather.changed.clear()
                    await gather.changed.wait()
        except TimeoutError:
            if not await self.run.server.reachable() or await self._disk_was_full():
                return False
            late = sorted(set(gather.expected) - set(gather.accepted) - set(gather.failed))
            log.warning("%s: deadline passed, without %s", self.what, ", ".join(late))
            await self._leave_out_silent(late)
        return True

    def _is_enough(self, size: int | None) -> bool:
        """Return true if enough devices have answered, or all that can; a silent device counts once it sends."""
        gather, fleet = self.gather, self.run.server.fleet
        expected = len(gather.expected) - sum(
            self.run.membership.silent.is_out(fleet, device) for device in self._spared
        )
        needed = expected if size is None else updates_needed(expected, size=size, quorum=self.run.plan.round.quorum)
        return len(gather.accepted) >= needed or len(gather.accepted) + len(gather.failed) >= expected

    async def _leave_out_silent(self, late: list[str]) -> None:
        """Leave out devices that let several deadlines pass silently, until they send a message."""
        server, at = self.run.server, self.run.server.clock()
        for device, cause in self.run.membership.silent.count_miss(server.fleet, late, at).items():
            log.warning("device %s takes no part until it sends a message: %s", device, cause)
            instance = server.fleet.statuses[device].instance
            number = self.gather.number
            out = LeftOut(device=device, instance=instance, cause=cause, round=number, at=at, silent=True)
            await self.run.record(out)

    async def _disk_was_full(self) -> bool:
        """Wait for a disk that rejected updates since the last call; return true if it did."""
        gather = self.gather
        if not gather.turned_away or self.run.store.retry_s is None:
            return False
        gather.turned_away = 0
        note = f"round {gather.number} waited for this server's disk, which rejected updates; its deadline starts again"
        log.warning("%s", note)
        await self.run.record(Noted(what=note))
        return True
