"""When a run is over because its devices have left it for good, as those do that stop early.

Who has left is told by the server state alone, so that a server that was killed ends as one that was not.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge_server.fleet import membership
from edge_server.journal.observed import Joined
from edge_server.journal.records import AnyRecord
from edge_server.rounds.round import Rounds
from shared.tensors.tree import State


def recall(rounds: Rounds, records: Iterable[AnyRecord]) -> None:
    """Learn from a run's journal who was ever there."""
    rounds.muster.seen |= {record.device for record in records if isinstance(record, Joined)}


async def over(rounds: Rounds, state: State) -> str:
    """Return why a run is over, as a sentence for the record; empty where it is not.

    It is over when fewer devices than the method needs have not left: of those that the plan names, or of all that were
    ever there. If none of these is there, the run waits for one as long as for any cohort.
    """
    left = rounds.algorithm.left(state)
    if not left:
        return ""
    ours, server, least = rounds.muster, rounds.server, rounds.algorithm.min_alive
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
    await membership.enough(server, ours, rounds.plan.cohort)
    here = ours.here(server.fleet)
    if not here or ours.training(server.fleet):
        return ""
    return f"all {len(here)} devices that are connected have left for good"
