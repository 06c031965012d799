"""Rollout engine: receive reports, decide, journal the decision, then send offers.

It may be killed at any moment and resumes from its journal: nothing is sent to a board before it is journalled, and no
message needs to arrive. An offer is repeated when a board connects, and periodically until the board answers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

from edge_server.journal.rollouts.file import (
    AnyRolloutRecord,
    BoardGivenUp,
    BoardReported,
    RolloutEnded,
    RolloutOrdered,
    WaveOpened,
)
from edge_server.release.rollout.board_reports import BoardReports
from edge_server.release.rollout.bundle_distributor import BundleDistributor
from edge_server.release.rollout.link import RolloutLink, RolloutOptions
from edge_server.release.rollout.orders import LoadedRollout
from edge_server.release.rollout.receive import BoardReceiver
from edge_server.release.rollout.record_log import RecordLog
from edge_server.release.rollout.send import BoardSender
from edge_server.release.rollout.step_limits import StepTimer, TimeLimit, step_limits
from edge_server.release.rollout.waves import (
    MAX_NAMED,
    AwaitBoards,
    Decision,
    EndRollout,
    IssueOrder,
    OpenWave,
    decide,
)
from shared.runtime.clock import utc_seconds, utc_stamp
from shared.runtime.executor import background

POLL_S = 0.5
"""Interval between reads of the journal for orders from other processes."""


class RolloutEngine:
    """A running rollout."""

    def __init__(self, rollout: LoadedRollout, link: RolloutLink, options: RolloutOptions) -> None:
        self._link, self._options = link, options
        self._log = RecordLog(rollout.journal, rollout.state, link.worker, options.on_record)
        self._reports, self._sender = BoardReports(self._log, link.clock), BoardSender(link)
        self._parts = BundleDistributor(link, self._log, self._reports.find_fetching, self._sender.send)
        self._timer, self._wait_reason = StepTimer(), ""
        self._all_offline_since: float | None = None

    async def run(self) -> None:
        """Run the rollout until it is over, or until cancelled if it stays.

        Raises:
            CorruptFile: The journal is damaged.
            Unwritable: The disk is full.
        """
        receiver = BoardReceiver(self._link, self._reports, self._parts, self._sender)
        async with receiver.running(), background(self._parts.run()):
            await asyncio.sleep(POLL_S)  # receive the retained messages before the first decision
            while await self._step():
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._log.changed.wait()
                self._log.changed.clear()

    async def _step(self) -> bool:
        """Journal and send everything due; return whether to continue."""
        self._give_up()
        self._reports.record_postponed()
        await self._log.write()
        decision = self._decide()
        while records := self._make_records(decision):
            await self._log.write(*records)
            decision = self._decide()
        self._note_wait(decision)
        await self._sender.send_due(self._log.state, self._reports)
        self._forget_served()
        await self._log.write()
        return self._options.stays or not isinstance(decision, EndRollout)

    def _give_up(self) -> None:
        """Give up boards that exceeded the time limit of a step."""
        boards, reports = self._reports.boards(), self._reports
        limits = step_limits(self._log.state, boards, self._parts.wanted_bytes)
        for device, cause in self._timer.overdue(limits, self._link.clock()).items():
            self._log.add(BoardGivenUp(at=utc_stamp(), device=device, cause=cause))
        reports.given_up_at = {
            device: reports.given_up_at.get(device) or self._time_of(device, limit)
            for device, limit in limits.items()
            if not boards[device].online
        }

    def _time_of(self, device: str, limit: TimeLimit) -> str:
        """Return the UTC time at which an offline board will be given up."""
        until = datetime.fromtimestamp(utc_seconds() + self._timer.remaining_s(device, limit), UTC)
        return f"{until:%Y-%m-%dT%H:%M:%SZ}"

    def _decide(self) -> Decision:
        """Decide the next action; stop once all boards have been offline for `wait_s`."""
        decision, now, wait_s = (
            decide(self._log.state, self._reports.boards()),
            self._link.clock(),
            self._options.wait_s,
        )
        if isinstance(decision, OpenWave) and (new := self._reports.find_newcomers(decision.devices)):
            return AwaitBoards(f"waiting for the first report of {', '.join(new[:MAX_NAMED])}")
        if not (isinstance(decision, AwaitBoards) and decision.no_board_online):
            self._all_offline_since = None
            return decision
        now = self._link.clock()
        self._all_offline_since = now if self._all_offline_since is None else self._all_offline_since
        if now - self._all_offline_since < wait_s:
            return decision
        return IssueOrder("stop", f"no board connected within {wait_s:g} s: {decision.why}")

    def _note_wait(self, decision: Decision) -> None:
        why = decision.why if isinstance(decision, AwaitBoards) else ""
        if why and why != self._wait_reason:
            self._options.on_wait(why)
        self._wait_reason = why

    def _make_records(self, decision: Decision) -> list[AnyRolloutRecord]:
        """Return the journal records of a decision; empty if it changes nothing."""
        now, state = utc_stamp(), self._log.state
        match decision:
            case OpenWave():
                reports = [(device, self._reports.models[device]) for device in decision.devices]
                records = [
                    BoardReported(at=now, device=device, status=status) for device, status in reports if status.name
                ]
                return [*records, WaveOpened(at=now, devices=decision.devices, canary=decision.canary)]
            case IssueOrder():
                return [RolloutOrdered(at=now, order=decision.order, cause=decision.cause)]
            case EndRollout() if (state.outcome, state.behind) != (decision.outcome, decision.behind):
                return [RolloutEnded(at=now, outcome=decision.outcome, behind=decision.behind)]
        return []

    def _forget_served(self) -> None:
        """Stop sending parts to boards that need none or are offline."""
        recipients = self._reports.find_fetching() if self._log.state.mode in ("going", "paused") else set()
        for device in self._reports.models.keys() - recipients:
            self._parts.forget(device)
