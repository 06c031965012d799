"""Wait until enough devices have answered, or until the deadline: who lets it pass without a word is asked no more."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Muster
from edge_server.journal.checkpoints import Store
from edge_server.journal.disk import persist
from edge_server.journal.records import LeftOut, Noted
from edge_server.plan.plan import Plan
from edge_server.rounds.assign import updates_needed
from edge_server.rounds.collect_updates import Gather

log = logging.getLogger(__name__)


@dataclass
class Waiting:
    """The wait for one round's answers.

    Attributes:
        what: Is waited for, for people.
    """

    plan: Plan
    server: Server
    store: Store
    muster: Muster
    gather: Gather
    what: str
    _spared: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Note who has spoken until now; to be called before anybody is given its task."""
        silent, fleet = self.muster.silent, self.server.fleet
        self._spared = silent.spared(fleet, self.gather.expected)
        silent.begin(fleet, self.gather.expected, self.server.clock())

    async def until_quorum(self, *, size: int | None) -> None:
        """Wait; a deadline in which the broker or the disk was away begins anew.

        Args:
            size: Of the cohort without over-selection, 0 for all that were asked; None: all of them, and no share.
        """
        while not await self._has_passed(size):
            pass

    async def _has_passed(self, size: int | None) -> bool:
        """Wait for one deadline at most; tell whether the round is over."""
        gather = self.gather
        try:
            async with asyncio.timeout(self.plan.round.deadline_s):
                while not self._is_enough(size):
                    gather.changed.clear()
                    await gather.changed.wait()
        except TimeoutError:
            if not await self.server.reachable() or await self._disk_was_full():
                return False
            late = sorted(set(gather.expected) - set(gather.accepted) - set(gather.failed))
            log.warning("%s: deadline passed, without %s", self.what, ", ".join(late))
            await self._leave_out_silent(late)
        return True

    def _is_enough(self, size: int | None) -> bool:
        """Tell whether enough have answered, or all that may; a silent device counts as soon as it speaks."""
        gather, fleet = self.gather, self.server.fleet
        asked = len(gather.expected) - sum(self.muster.silent.is_out(fleet, device) for device in self._spared)
        needed = asked if size is None else updates_needed(asked, size=size, quorum=self.plan.round.quorum)
        return len(gather.accepted) >= needed or len(gather.accepted) + len(gather.failed) >= asked

    async def _leave_out_silent(self, late: list[str]) -> None:
        """Ask no more, until they speak, who have let some deadlines pass without a word."""
        server, at = self.server, self.server.clock()
        for device, cause in self.muster.silent.passed(server.fleet, late, at).items():
            log.warning("device %s takes no part until it speaks: %s", device, cause)
            instance = server.fleet.statuses[device].instance
            number = self.gather.number
            out = LeftOut(device=device, instance=instance, cause=cause, round=number, at=at, silent=True)
            await persist(server.worker, self.store.retry_s, self.store.append, out)

    async def _disk_was_full(self) -> bool:
        """Tell whether the disk took no update since this was asked last, and wait for it: no device can help that."""
        gather = self.gather
        if not gather.turned_away or self.store.retry_s is None:
            return False
        gather.turned_away = 0
        note = f"round {gather.number} waited for this server's disk, which took no update; its deadline begins anew"
        log.warning("%s", note)
        await persist(self.server.worker, self.store.retry_s, self.store.append, Noted(what=note))
        return True
