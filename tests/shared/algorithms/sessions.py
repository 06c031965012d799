"""Split sessions driven by hand: several devices, step by step, and no network between the halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.algorithms.base import Algorithm, Batches, Result, Session
from shared.models.base import Model
from shared.protocol.messages import Assignment, Missed
from shared.tensors.tree import State, Tree


@dataclass
class Driven:
    """What a round of sessions came to.

    Attributes:
        state: The server's, after the last step.
        results: By device.
        devices: States of the devices.
        ups: What went up, step by step.
        downs: What came down.
    """

    state: State
    results: dict[str, Result] = field(default_factory=dict)
    devices: dict[str, State] = field(default_factory=dict)
    ups: list[dict[str, Tree]] = field(default_factory=list)
    downs: list[dict[str, Tree]] = field(default_factory=list)


def drive(  # noqa: PLR0913 - a round has so many sides
    algorithm: Algorithm,
    model: Model,
    state: State,
    told: Mapping[str, Assignment],
    batches: Mapping[str, Batches],
    *,
    before: Mapping[str, State] | None = None,
    misses: Callable[[int, str], bool] = lambda _step, _device: False,
    spoil: Callable[[int, str, Tree], None] = lambda _step, _device, _up: None,
) -> Driven:
    """Run the sessions of a round side by side, in order of device.

    Args:
        algorithm: A split one.
        model: Without storage.
        state: The server's before the round; not changed.
        told: Who takes part.
        batches: Of each.
        before: States of the devices.
        misses: Whether a step goes on without a device.
        spoil: Changes what a device sends.
    """
    done = Driven(State({key: leaf.clone() for key, leaf in state.tree.items()}, state.facts))
    sessions: dict[str, Session] = {}
    for device in sorted(told):
        start = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, device, told[device]).items()}
        own = (before or {}).get(device, State())
        sessions[device] = algorithm.local(model, own, start, batches[device], told[device])
    ups = {device: next(session) for device, session in sessions.items()}
    for step in range(1, max(one.steps for one in told.values()) + 1):
        here = {device: up for device, up in ups.items() if not misses(step, device)}
        for device, up in here.items():
            spoil(step, device, up)
            algorithm.split.check_features(model, done.state, told[device], up)
        downs = {}
        if here:
            done.state, downs = algorithm.split.serve(model, done.state, told, here)
        done.ups.append(here)
        done.downs.append(downs)
        for device, session in sessions.items():
            try:
                ups[device] = session.send(downs.get(device, Missed(1)))
            except StopIteration as ended:
                done.devices[device], done.results[device] = ended.value
    return done
