"""From the updates of a round to the next server state."""

from __future__ import annotations

from collections.abc import Mapping

from edge_server.rounds.check_update import read
from edge_server.rounds.collect_updates import Gather
from shared.algorithms.base import Algorithm
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, check_like


def folded(algorithm: Algorithm, state: State, assignments: Mapping[str, Assignment], gather: Gather) -> State:
    """Fold the stored updates one at a time, in order of device: the sum does not depend on who came first.

    Raises:
        WireError: The sum is no model.
    """
    mean = algorithm.empty(state)
    for device in sorted(gather.accepted):
        update = read(gather.path(device), gather.accepted[device].update, gather.codec)
        mean = algorithm.absorb(mean, assignments[device], update)
        del update  # its pages are the file's; the next one needs the room
    after = algorithm.between(algorithm.aggregate(state, mean))
    check_like(after.tree, after.tree)
    return after
