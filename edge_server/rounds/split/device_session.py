"""Hold one device's session in a split round: its life in a step as a transition table, its payloads on their way.

A device is `awaited`, or `absent` while no step waits for it. It has `offered` features of the open step, which then
are `delivered` or `refused`. When the step closes, who has delivered is awaited again, and who was awaited in vain is
absent. One that has `failed` is out for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edge_server.rounds.split.kept_answers import KeptAnswers
from shared.protocol.messages import Features
from shared.tensors.tree import Tree
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import Sender, WaitingPieces

PATIENCE = 2
"""Deadlines in a row that one device may cost the others."""

StepState: TypeAlias = Literal["awaited", "absent", "offered", "delivered", "refused", "failed"]
Event: TypeAlias = Literal["return", "offer", "deliver", "refuse", "close", "close overdue", "fail"]
"""`return`: it speaks and has patience left. `close`: the step is served, `close overdue`: and has none left."""

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
    """Where one device is in the session, and what of it is here.

    Attributes:
        state: In the open step.
        step: The next step that it can offer, as far as is known here.
        delivered: Digest of its features of the open step, when they are delivered.
        at: The step of its last offer; behind those that were served with it where it has begun anew.
        answers: What it was answered.
        late: Deadlines in a row that it let pass.
        missed: Steps that went on without it.
        offer: Its last offer whose frames were asked for.
        receiver: Of these features, until they are read.
        features: Those that are read, until the step is served.
        size: The root mean square of their floating-point values.
        gradient: The one that it is sent; nothing while a step is being computed.
        waiting: Pieces of the gradient that wait to be sent.
    """

    device: str
    state: StepState = "awaited"
    step: int = 1
    delivered: bytes = b""
    at: int = 0
    answers: KeptAnswers = field(default_factory=KeptAnswers)
    late: int = 0
    missed: int = 0
    offer: Features | None = None
    receiver: Receiver[MemorySink] | None = None
    features: Tree | None = None
    size: float = 0.0
    gradient: Sender | None = None
    waiting: WaitingPieces = field(default_factory=WaitingPieces)

    def follow(self, event: Event) -> None:
        """Go on to the state after an event.

        Raises:
            ValueError: The table has no such event in this state: a fault of ours.
        """
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"event {event!r} while {self.device} is {self.state}")
        self.state = following

    @property
    def is_alive(self) -> bool:
        """Whether it is of this session still."""
        return self.state != "failed"

    @property
    def is_overdue(self) -> bool:
        """Whether its patience is used up: it is not waited for until it has delivered."""
        return self.late >= PATIENCE

    @property
    def is_waited_for(self) -> bool:
        """Whether the open step waits for its features."""
        return self.state == "awaited" or (self.state == "offered" and not self.is_overdue)

    def fail(self) -> None:
        """Part for good, with all that is here."""
        self.follow("fail")
        self.receiver = self.features = self.gradient = None
        self.answers = KeptAnswers()
        self.waiting.clear()

    def close(self, step: int) -> None:
        """Note that a step was served, with this device if it had delivered.

        Args:
            step: The one that was open.
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
        """Part with the features of the step that was served, and with the gradient of the one before: it has that.

        One that has begun anew since it delivered them is given that of an earlier step, and may need it still.
        """
        assert self.features is not None, "who has delivered has features"
        features, self.features = self.features, None
        if self.at >= self.answers.last:
            self.gradient = None
            self.waiting.clear()
        return features

    def send(self, gradient: Sender) -> None:
        """Let a gradient be the one that it is sent; what waits of another is of no use to it any more."""
        if gradient is not self.gradient:
            self.gradient = gradient
            self.waiting.clear()
