"""Local training epoch by epoch, and the mean loss over all epochs.

Methods that rank neurons (Z. Niu, H. Dong, A. K. Qin, https://arxiv.org/abs/2403.11464) do so after one epoch, and
FedSelect (https://arxiv.org/abs/2404.02478) trains two kinds of parameters in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.algorithms.base import Batch, Batches
from shared.algorithms.fedavg import descend_batches
from shared.protocol.messages import Hyper


def epochs(batches: Batches) -> Iterator[Iterator[Batch]]:
    """Yield the batches of one epoch after the other; each must be used up before the next is asked for."""
    flow = iter(batches)
    for first in flow:
        yield _epoch(first, flow, batches.num_examples)


def _epoch(first: Batch, flow: Iterator[Batch], count: int) -> Iterator[Batch]:
    seen = len(first[1])
    yield first
    while seen < count:
        try:
            batch = next(flow)
        except StopIteration:
            return
        seen += len(batch[1])
        yield batch


@dataclass
class Tally:
    """The mean loss of a training in stretches.

    Attributes:
        seen: Examples so far, as often as they were trained on.
        total: Sum of their losses.
    """

    seen: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """Loss of an example; None where there was none."""
        return self.total / self.seen if self.seen else None

    def train(
        self,
        network: Callable[[Tensor], Tensor],
        weights: Sequence[tuple[str, Tensor]],
        batches: Iterable[Batch],
        hyper: Hyper,
        correct: Callable[[], None] | None = None,
    ) -> None:
        """Do SGD for one stretch, with a momentum of its own; arguments as those of `descend_batches`.

        Args:
            network: Logits of shape (N, classes) of inputs.
            weights: Parameters by name, changed in place.
            batches: Inputs of shape (N, ...), labels of shape (N,).
            hyper: Learning rate, momentum, weight decay.
            correct: Changes gradients before each step.
        """
        before = self.seen
        loss = descend_batches(network, weights, self._counted(batches), hyper, correct)
        self.total += 0.0 if loss is None else loss * (self.seen - before)

    def _counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.seen += len(batch[1])
            yield batch
