"""What follows a round: the next, another try after a pause, an earlier model, or the run's end (retry, back-off).

When a run is over because its devices have left it for good, as those do that stop early:
who has left is told by the server state alone, so that a server that was killed ends as one that was not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_server.fleet import membership
from edge_server.journal.outcome import REMEDY, TRIES_TO_WAIT, grouped_causes
from edge_server.journal.records import LeftOut, Rewound, RoundClosed, RunClosed, closed_rounds
from edge_server.rounds.round import Rounds
from shared.errors import Diverged, is_cause
from shared.tensors.tree import State

log = logging.getLogger(__name__)

REPLAY_TRIES = 3
"""How often a replay repeats a round: its devices fail by rule, and nobody mends them meanwhile."""
FIRST_PAUSE_S = 1.0


@dataclass
class Repetition:
    """Decides after every round which is next.

    Attributes:
        is_live: Whether time may mend what made a round fail; then there is no end to its repetitions.
        forget: Is told of the first round that is done again.
        tries: How often the round that is next was missed, one time after the other.
        pause_s: Seconds before this try of it; they count as the round's.
        is_behind: Whether the run went back to an earlier model, which is to be loaded; whoever does so takes it back.
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
        """Return which round follows the last of those that have ended, after a pause where it is done again.

        Args:
            closed: Rounds that have ended, in order; perhaps none.
            number: The round that is next where that one was not missed.
        """
        rule = self.rounds.plan.round
        last = closed[-1] if closed and closed[-1].outcome == "missed" else None
        self._diverged = self._diverged + 1 if last and is_diverged(last) else 0
        if last and self._diverged >= (1 if rule.on_missed == "stop" else rule.most_diverged):
            return await self._leave_diverged(last)
        if last and (refusal := await self._refusal(last)):
            return RunClosed(outcome="refused", cause=refusal)
        if last and rule.on_missed == "stop":
            return RunClosed(outcome="stopped", cause=f"round {last.round} had too few updates")
        if last and rule.on_missed == "retry" and (self.is_live or self.tries < REPLAY_TRIES):
            await self._repeat(last)
            return last.round
        self.tries, self.pause_s = 0, 0.0
        return number

    async def _refusal(self, closed: RoundClosed) -> str:
        """Return why the run is over where every device has refused its task for good; empty where one may do it.

        Devices that the plan does not name may come yet: for these the run has waited once before.
        """
        rounds, fleet = self.rounds, self.rounds.server.fleet
        if not rounds.muster.has_refused(rounds.plan, fleet):
            return ""
        if not rounds.plan.device and (closed.failed or closed.arrived):
            return ""
        records = await rounds.server.worker(rounds.store.records)
        causes = {one.device: one.cause for one in records if isinstance(one, LeftOut) and not one.silent}
        return f"every device has refused its task for good: {'; '.join(grouped_causes(causes))}"

    async def _repeat(self, closed: RoundClosed) -> None:
        """Make a missed round void and wait, twice as long as before it was missed this time, up to its deadline."""
        self.pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.tries, 30), self.rounds.plan.round.deadline_s)
        self.tries += 1
        cause = f"missed: {missed_cause(closed)}"
        what = f"{len(closed.arrived)} updates came"
        what += f", {len(closed.failed)} devices failed" if closed.failed else ""  # why was told when they did
        log.warning("round %d is done again in %g s, missed: %s", closed.round, self.pause_s, what)
        if self.tries == TRIES_TO_WAIT:
            log.warning("round %d was missed %d times one after the other: %s", closed.round, self.tries, REMEDY)
        await self._go_back(Rewound(round=closed.round, cause=cause, missed=True))
        await asyncio.sleep(self.pause_s)

    async def _leave_diverged(self, closed: RoundClosed) -> int | RunClosed:
        """Go back to the last good model; end the run where there is none, or it led no further than to this round."""
        store, number = self.rounds.store, closed.round
        reached = [one.round for one in closed_rounds(store.records()) if one.outcome == "aggregated"]
        tries = f"training diverged {self._diverged} times one after the other, last in round {number}"
        cause = f"{tries}: {missed_cause(closed)}"
        if not reached or number <= self._back_from or self.rounds.plan.round.on_missed == "stop":
            return RunClosed(outcome="diverged", cause=cause)
        good = await self.rounds.server.worker(store.good_number)
        first = good + 1 if 0 < good < reached[-1] else reached[-1]
        log.warning("round %d: %s; going back to the model before round %d", number, cause, first)
        await self._go_back(Rewound(round=first, cause=cause))
        self.tries, self.pause_s, self._diverged, self._back_from, self.is_behind = 0, 0.0, 0, number, True
        return first

    async def _go_back(self, rewound: Rewound) -> None:
        await self.rounds.persist(self.rounds.store.append, rewound)
        self.forget(rewound.round)


def is_diverged(closed: RoundClosed) -> bool:
    """Tell whether a missed round was missed since training diverged, on most devices that answered or in their sum."""
    diverged = sum(is_cause(cause, Diverged) for cause in closed.failed.values())
    return bool(closed.refused.get("aggregate")) or 0 < len(closed.failed) + len(closed.arrived) <= 2 * diverged


def missed_cause(closed: RoundClosed) -> str:
    """Return why a round was missed: how many updates came, and what devices said that could not."""
    return "; ".join([f"{len(closed.arrived)} updates came", *grouped_causes(closed.failed)])


async def reason_to_end(rounds: Rounds, state: State) -> str:
    """Return why a run is over, as a sentence for the record; empty where it is not.

    It is over when fewer devices than the method needs have not left: of those that the plan names, or of all that were
    ever there. If none of these is there, the run waits for one as long as for any cohort.
    """
    departure = rounds.algorithm.departure
    if departure is None or not (left := departure.left(state)):
        return ""
    ours, server, least = rounds.muster, rounds.server, departure.min_alive
    ours.seen |= set(filter(ours.takes, server.fleet.statuses))
    everybody = ours.seen if ours.members is None else ours.members
    gone, alive = len(left & everybody), len(everybody - left)
    if alive < least:
        rest = "" if least == 1 else f", {alive} have not, fewer than {least}"
        return f"{gone} of {len(everybody)} devices have left for good{rest}"
    if ours.members is not None:
        return ""
    ours.left = left
    await server.reachable()
    await membership.wait_for_cohort(server, ours, rounds.plan.cohort)
    here = ours.here(server.fleet)
    if not here or ours.training(server.fleet):
        return ""
    return f"all {len(here)} devices that are connected have left for good"
