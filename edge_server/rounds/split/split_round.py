"""What a round of a split method has besides: somebody who serves its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_server.config import LinkConfig
from edge_server.fleet.hub import Server
from edge_server.plan.plan import Plan
from edge_server.rounds.split.barrier import Barrier
from edge_server.rounds.split.features_in import Incoming
from edge_server.rounds.split.gradients_out import Gradients
from edge_server.rounds.split.session import Splitting
from edge_server.rounds.split.top_model import Top, own
from shared.algorithms.base import Algorithm
from shared.codecs import CODECS
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.registry import build
from shared.tensors.tree import State


def begin(  # noqa: PLR0913 - what a round is made of
    plan: Plan,
    algorithm: Algorithm,
    model: Model,
    server: Server,
    link: LinkConfig,
    *,
    number: int,
    state: State,
    assignments: Mapping[str, Assignment],
) -> Splitting | None:
    """Return who serves a round's steps, on a copy of the state; None where the devices train alone."""
    if algorithm.serve is None:
        return None
    steps = max((told.steps for told in assignments.values()), default=0)
    codec = build(CODECS, plan.cut_codec, "cut_codec")
    top = Top(algorithm, model, own(state), codec, assignments, plan.seed, before=(number - 1) * steps)
    barrier = Barrier(steps, plan.round.step_deadline_s, assignments)
    incoming = Incoming(server.site, server.transport, server.clock, link, server.paces)
    gradients = Gradients(server.site, server.transport)
    return Splitting(server.clock, server.worker, top, barrier, incoming, gradients)


def account(splitting: Splitting | None) -> dict[str, Any]:
    """Return what is recorded of a round's steps; nothing of one that is not split."""
    if splitting is None:
        return {}
    barrier = splitting.barrier
    return {"steps": barrier.step - 1, "missed": dict(sorted(barrier.missed.items()))}
