"""Device session of a split round: state machine and payloads in flight.

A device is `awaited`, or `absent` while no step waits for it. It has `offered` features of the open step, which then
are `delivered` or `refused`. When the step closes, a device that delivered is awaited again, and one that was awaited
but did not deliver is absent. A `failed` device is out for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edge_server.rounds.split.gradient_store import SentGradients
from shared.protocol.messages import Features
from shared.tensors.tree import Tree
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import PieceQueue, Sender

PATIENCE = 2
"""Consecutive deadlines that one device may cost the others."""

StepState: TypeAlias = Literal["awaited", "absent", "offered", "delivered", "refused", "failed"]
Event: TypeAlias = Literal["return", "offer", "deliver", "refuse", "close", "close overdue", "fail"]
"""`return`: a message came and patience is left. `close`: the step was served; `close overdue`: patience is used up."""

TRANSITIONS: Mapping[StepState, Mapping[Event, StepState]] = {
    "awaited": {
        "return": "awaited",
        "offer": "offered",
        "close": "absent",
        "close overdue": "absent",
        "fail": "failed",
    },
    "absent": {
        "return": "awaited",
        "offer": "offered",
        "close": "absent",
        "close overdue": "absent",
        "fail": "failed",
    },
    "offered": {
        "return": "offered",
        "offer": "offered",
        "deliver": "delivered",
        "refuse": "refused",
        "close": "absent",
        "close overdue": "absent",
        "fail": "failed",
    },
    "delivered": {
        "return": "delivered",
        "offer": "offered",
        "refuse": "refused",
        "close": "awaited",
        "fail": "failed",
    },
    "refused": {
        "return": "refused",
        "close": "awaited",
        "close overdue": "absent",
        "fail": "failed",
    },
    "failed": {"fail": "failed"},
}


@dataclass
class DeviceSession:
    """State and payloads of one device.

    Attributes:
        state: Its state in the open step.
        step: The next step that it can offer, as far as the server knows.
        delivered: Digest of its delivered features of the open step.
        at: The step of its last offer; below the last served step after a restart.
        answers: Gradients already sent, by step.
        late: Number of consecutive missed deadlines.
        missed: Number of steps that ran without it.
        offer: Its last offer whose frames were requested.
        receiver: Receives these features until they are decoded.
        features: Decoded features, until the step is served.
        size: Root mean square of their floating-point values.
        gradient: The gradient being sent; None while a step is computed.
        pending: Requested pieces of the gradient, not sent yet.
    """

    device: str
    state: StepState = "awaited"
    step: int = 1
    delivered: bytes = b""
    at: int = 0
    answers: SentGradients = field(default_factory=SentGradients)
    late: int = 0
    missed: int = 0
    offer: Features | None = None
    receiver: Receiver[MemorySink] | None = None
    features: Tree | None = None
    size: float = 0.0
    gradient: Sender | None = None
    pending: PieceQueue = field(default_factory=PieceQueue)

    def follow(self, event: Event) -> None:
        """Move to the state after an event.

        Raises:
            ValueError: The table has no such event in this state, which is a bug.
        """
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"event {event!r} while {self.device} is {self.state}")
        self.state = following

    @property
    def is_alive(self) -> bool:
        """True until the device fails."""
        return self.state != "failed"

    @property
    def is_overdue(self) -> bool:
        """True if the device exceeded its patience: the barrier no longer waits for it until it delivers."""
        return self.late >= PATIENCE

    @property
    def is_waited_for(self) -> bool:
        """True if the open step waits for its features."""
        return self.state == "awaited" or (self.state == "offered" and not self.is_overdue)

    def fail(self) -> None:
        """Mark as failed and drop all payloads."""
        self.follow("fail")
        self.receiver = self.features = self.gradient = None
        self.answers = SentGradients()
        self.pending.clear()

    def close(self, step: int) -> None:
        """Account for a served step, with this device if it had delivered.

        Args:
            step: The step that was open.
        """
        if self.state == "delivered":
            self.answers.serve(step, self.delivered)
            self.step, self.late = step + 1, 0
        else:
            self.missed += 1
            self.late += self.is_waited_for
            if self.state in {"offered", "refused"}:
                self.step = step + 1
        self.receiver = None
        self.follow("close overdue" if self.is_overdue else "close")

    def take_features(self) -> Tree:
        """Return and release the features of the served step; release the previous gradient, which the device has.

        A device that restarted after delivering is being sent an earlier gradient, which is not released.
        """
        assert self.features is not None, "who has delivered has features"
        features, self.features = self.features, None
        if self.at >= self.answers.last:
            self.gradient = None
            self.pending.clear()
        return features

    def send(self, gradient: Sender) -> None:
        """Set the gradient to send; requested pieces of another one are dropped."""
        if gradient is not self.gradient:
            self.gradient = gradient
            self.pending.clear()
