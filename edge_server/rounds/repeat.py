"""Retry with back-off, roll back, or end after a missed round.

A run also ends when its devices have left for good, as with early stopping. Departures are read from the server state
alone, so that a restarted server ends in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_server.fleet.membership import wait_for_cohort
from edge_server.journal.outcome import REMEDY, TRIES_TO_WAIT, grouped_causes
from edge_server.journal.records import LeftOut, Rewound, RoundClosed, RunClosed, select, valid_records
from edge_server.rounds.round import Rounds
from shared.errors import Diverged, is_cause
from shared.tensors.tree import State

log = logging.getLogger(__name__)

REPLAY_TRIES = 3
"""Tries of a round in a replay: its devices fail by rule, so waiting does not help."""
FIRST_PAUSE_S = 1.0
MOST_DIVERGED = 3
"""Misses in a row because training diverged, after which the run returns to its last good model."""

PATH = re.compile(r"\S*/\S*")
"""A path in a device's message, which is another one on each device."""


@dataclass
class Repetition:
    """Chooses what follows a round.

    Attributes:
        is_live: Whether time may fix the cause of a missed round; then retries have no limit.
        forget: Called with the first round that is repeated.
        tries: Consecutive misses of the next round.
        pause_s: Seconds before this try, counted as part of the round.
        is_behind: Whether the run went back to an earlier model; reset by the caller that loads it.
    """

    rounds: Rounds
    is_live: bool
    forget: Callable[[int], None]
    tries: int = 0
    pause_s: float = 0.0
    is_behind: bool = False
    _diverged: int = 0
    _back_from: int = 0

    async def after(self, closed: Sequence[RoundClosed], number: int) -> int | RunClosed:
        """Return the round that follows, after a pause if it is a repetition, or the end of the run.

        Args:
            closed: Closed rounds in order; may be empty.
            number: The next round if the last was not missed.
        """
        rule = self.rounds.run.plan.round
        last = closed[-1] if closed and closed[-1].outcome == "missed" else None
        self._diverged = self._diverged + 1 if last and is_diverged(last) else 0
        is_lasting = last and (rule.on_missed == "stop" or last.round == 1)  # the same initial model diverges again
        if last and self._diverged >= (1 if is_lasting else MOST_DIVERGED):
            return await self._roll_back(last)
        if last and (refusal := await self._explain_refusal(last)):
            return RunClosed(outcome="refused", cause=refusal)
        if last and rule.on_missed == "stop":
            return RunClosed(outcome="stopped", cause=f"round {last.round} had too few updates")
        if last and rule.on_missed == "retry" and (self.is_live or self.tries < REPLAY_TRIES):
            await self._repeat(last)
            return last.round
        self.tries, self.pause_s = 0, 0.0
        return number

    async def _explain_refusal(self, closed: RoundClosed) -> str:
        """Return why the run is over if every device has refused its task for good; otherwise empty.

        If the plan names no devices, others may still connect: a run waits for them once, unless several devices have
        refused for the same reason, which is then the plan's.
        """
        rounds, fleet = self.rounds, self.rounds.run.server.fleet
        if not rounds.run.membership.has_refused(rounds.run.plan, fleet):
            return ""
        refusals = select(rounds.run.store.records(), LeftOut)
        causes = {record.device: record.cause for record in refusals if not record.silent}
        is_shared = len(causes) > 1 and len({PATH.sub("", cause) for cause in causes.values()}) == 1
        if not (rounds.run.plan.device or is_shared) and (closed.failed or closed.arrived):
            return ""
        return f"every device has refused its task for good: {'; '.join(grouped_causes(causes))}"

    async def _repeat(self, closed: RoundClosed) -> None:
        """Void a missed round and pause, doubling the pause at each miss up to the round's deadline."""
        self.pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.tries, 30), self.rounds.run.plan.round.deadline_s)
        self.tries += 1
        cause = f"missed: {explain_miss(closed)}"
        what = f"{len(closed.arrived)} updates came"
        what += f", {len(closed.failed)} devices failed" if closed.failed else ""  # the causes were logged before
        log.warning("round %d is repeated in %g s, missed: %s", closed.round, self.pause_s, what)
        if self.tries == TRIES_TO_WAIT:
            log.warning("round %d was missed %d times in a row: %s", closed.round, self.tries, REMEDY)
        await self._go_back(Rewound(round=closed.round, cause=cause, missed=True))
        await asyncio.sleep(self.pause_s)

    async def _roll_back(self, closed: RoundClosed) -> int | RunClosed:
        """Return to the last good model; end the run if there is none, or if it led to the same round again."""
        store, number = self.rounds.run.store, closed.round
        closed_rounds = valid_records(store.records(), RoundClosed)
        reached = [record.round for record in closed_rounds if record.outcome == "aggregated"]
        often = f" {self._diverged} times in a row, last" if self._diverged > 1 else ""
        cause = f"training diverged{often} in round {number}: {explain_miss(closed)}"
        if not reached or number <= self._back_from or self.rounds.run.plan.round.on_missed == "stop":
            return RunClosed(outcome="diverged", cause=cause)
        good = await self.rounds.run.server.worker(store.good_number)
        first = good + 1 if 0 < good < reached[-1] else reached[-1]
        log.warning("round %d: %s; going back to the model before round %d", number, cause, first)
        await self._go_back(Rewound(round=first, cause=cause))
        self.tries, self.pause_s, self._diverged, self._back_from, self.is_behind = 0, 0.0, 0, number, True
        return first

    async def _go_back(self, rewound: Rewound) -> None:
        await self.rounds.run.record(rewound)
        self.forget(rewound.round)


def is_diverged(closed: RoundClosed) -> bool:
    """Return true if a round was missed because training diverged, on most answering devices or in the aggregate."""
    diverged = sum(is_cause(cause, Diverged) for cause in closed.failed.values())
    return bool(closed.refused.get("aggregate")) or 0 < len(closed.failed) + len(closed.arrived) <= 2 * diverged


def explain_miss(closed: RoundClosed) -> str:
    """Return why a round was missed: number of updates and grouped causes of failure."""
    return "; ".join([f"{len(closed.arrived)} updates came", *grouped_causes(closed.failed)])


async def reason_to_end(rounds: Rounds, state: State) -> str:
    """Return why a run is over, as a sentence for the journal; empty if it is not.

    It is over when fewer devices than the algorithm needs remain: of the plan's devices, or of all that were ever
    online. If none of these is online, the run waits for one as long as for any cohort.
    """
    departure = rounds.run.algorithm.departure
    if departure is None or not (departed := departure.departed(state)):
        return ""
    membership, server, least = rounds.run.membership, rounds.run.server, departure.min_alive
    membership.ever_online |= set(filter(membership.takes, server.fleet.statuses))
    everybody = membership.ever_online if membership.members is None else membership.members
    departures, alive = len(departed & everybody), len(everybody - departed)
    if alive < least:
        detail = "" if least == 1 else f", {alive} have not, fewer than {least}"
        return f"{departures} of {len(everybody)} devices have left for good{detail}"
    if membership.members is not None:
        return ""
    membership.departed = departed
    await server.reachable()
    await wait_for_cohort(server, membership, rounds.run.plan.cohort)
    online = membership.list_online(server.fleet)
    if not online or membership.list_trainable(server.fleet):
        return ""
    return f"all {len(online)} devices that are connected have left for good"
