"""What a device was answered in a session: one that begins it anew does the same steps again, to the same bits.

A device half draws by its seed and the step's number. So a trainer that was killed, begins at step 1 and is answered as
before comes to where it was, and the server's part takes no step twice. What is kept are the payloads that were sent,
not copied; the gradients of a round have one bound for all devices together, and end with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.transfer.sender import Sender


@dataclass
class Shelf:
    """Room for the gradients of one round.

    Attributes:
        limit: Bytes of all devices' together.
        used: Of these.
        is_full: Whether one found no room.
    """

    limit: int
    used: int = 0
    is_full: bool = False

    def take(self, size: int) -> bool:
        """Take room for so many bytes, if there is."""
        if self.used + size > self.limit:
            self.is_full = True
            return False
        self.used += size
        return True


@dataclass
class KeptAnswers:
    """Of one device, by step. The last one is kept in any case, until the next: the device may not have it yet."""

    _features: dict[int, bytes] = field(default_factory=dict)
    _gradients: dict[int, Sender] = field(default_factory=dict)
    _parted: set[int] = field(default_factory=set)
    _shelfless: int = 0

    @property
    def last(self) -> int:
        """The last step that was served with the device; 0 for none."""
        return next(reversed(self._features), 0)

    def serve(self, step: int, features: bytes) -> None:
        """Note that a step, later than all before, was served with the device's features; `put` follows.

        Args:
            step: Which.
            features: Their digest.
        """
        if self._shelfless:
            del self._gradients[self._shelfless]
            self._parted.add(self._shelfless)
            self._shelfless = 0
        self._features[step] = features

    def put(self, step: int, gradient: Sender, shelf: Shelf) -> None:
        """Keep a step's gradient; nothing of a device that failed meanwhile.

        Args:
            step: The last one.
            gradient: As it is sent.
            shelf: Has room for it, or not.
        """
        if step in self._features:
            self._gradients[step] = gradient
            if not shelf.take(gradient.transfer.size):
                self._shelfless = step

    def answers(self, step: int, features: bytes) -> bool:
        """Tell whether these features were served at a step: its gradient is here, or being computed."""
        return self._features.get(step) == features and step not in self._parted

    def following(self, step: int) -> int | None:
        """Return the next step that was served with the device behind one that was not; None behind any other."""
        return None if step in self._features else min((one for one in self._features if one > step), default=None)

    def of_step(self, step: int) -> Sender | None:
        """Return a step's gradient; None while it is being computed."""
        return self._gradients.get(step)
