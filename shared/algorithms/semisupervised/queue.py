"""SemiSFL's two-level queue: teacher projections of earlier labelled and unlabelled batches.

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule keeps all in one ring, from which 640 unlabelled entries a
step push the labelled ones within two steps, counts zeros of empty slots as references, and lets labelled entries be
negatives alone. This implementation has two rings, ignores empty slots, and treats labelled entries as confident. A
queue of earlier batches is that of K. He et al., Momentum Contrast, CVPR 2020, https://arxiv.org/abs/1911.05722.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shared.algorithms.semisupervised.losses import References
from shared.tensors.tree import Tree

LABELLED, UNLABELLED = "queue/labelled/", "queue/unlabelled/"


@dataclass(frozen=True)
class Ring:
    """Ring buffer of the last references, first in, first out.

    Attributes:
        slots: As many references as the capacity; zeros where never written.
    """

    slots: References
    written: int = 0

    @classmethod
    def empty(cls, capacity: int, width: int) -> Ring:
        """Return a ring with room for `capacity` projections of `width` numbers."""
        return cls(
            References(
                torch.zeros(capacity, width),
                torch.zeros(capacity, dtype=torch.int64),
                torch.zeros(capacity, dtype=torch.bool),
            )
        )

    @property
    def capacity(self) -> int:
        """Maximum number of references."""
        return len(self.slots.labels)

    def references(self) -> References:
        """Return the stored references, in any order."""
        count, slots = min(self.written, self.capacity), self.slots
        return References(slots.projections[:count], slots.labels[:count], slots.confident[:count])

    def push(self, new: References) -> Ring:
        """Return the ring with new references in place of the oldest; of more than the capacity, the last."""
        count = len(new.labels)
        fitting = min(count, self.capacity)
        places = torch.arange(self.written + count - fitting, self.written + count, device=new.labels.device)
        at = places % max(1, self.capacity)
        last = slice(count - fitting, count)
        slots = References(
            self.slots.projections.index_copy(0, at, new.projections[last]),
            self.slots.labels.index_copy(0, at, new.labels[last]),
            self.slots.confident.index_copy(0, at, new.confident[last]),
        )
        return Ring(slots, self.written + count)

    def clear(self) -> Ring:
        """Return an empty ring of the same shape."""
        return Ring.empty(self.capacity, self.slots.projections.shape[1])

    def tree(self, prefix: str) -> Tree:
        """Return the tensors, with `prefix` before their names."""
        return {
            f"{prefix}projections": self.slots.projections,
            f"{prefix}labels": self.slots.labels,
            f"{prefix}confident": self.slots.confident,
            f"{prefix}written": torch.tensor(self.written),
        }

    @classmethod
    def from_tree(cls, tree: Tree, prefix: str) -> Ring:
        """Read the output of `tree`."""
        slots = References(tree[f"{prefix}projections"], tree[f"{prefix}labels"], tree[f"{prefix}confident"])
        return cls(slots, int(tree[f"{prefix}written"]))


@dataclass(frozen=True)
class Queue:
    """Queue of both levels.

    Attributes:
        labelled: Written in supervised steps alone, so that its entries outlast a round.
        unlabelled: Written at every step of a session, cleared after it.
    """

    labelled: Ring
    unlabelled: Ring

    def with_current(self, current: References) -> References:
        """Return the current batch's references followed by all queued ones."""
        return References.concatenate(current, self.labelled.references(), self.unlabelled.references())

    def push_labelled(self, new: References) -> Queue:
        """Return the queue with another batch of the server."""
        return replace(self, labelled=self.labelled.push(new))

    def push_unlabelled(self, new: References) -> Queue:
        """Return the queue with another batch of the devices."""
        return replace(self, unlabelled=self.unlabelled.push(new))

    def after_session(self) -> Queue:
        """Return the queue for the start of the next round."""
        return replace(self, unlabelled=self.unlabelled.clear())

    def tree(self) -> Tree:
        """Return all tensors, by name."""
        return {**self.labelled.tree(LABELLED), **self.unlabelled.tree(UNLABELLED)}

    @classmethod
    def from_tree(cls, tree: Tree) -> Queue:
        """Read the output of `tree`."""
        return cls(Ring.from_tree(tree, LABELLED), Ring.from_tree(tree, UNLABELLED))
