"""Local training epoch by epoch, and the mean loss over all epochs.

Methods that rank neurons (Z. Niu, H. Dong, A. K. Qin, https://arxiv.org/abs/2403.11464) do so after one epoch, and
FedSelect (https://arxiv.org/abs/2404.02478) trains two kinds of parameters in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shared.algorithms.base import Batch, Batches
from shared.algorithms.fedavg import descend_batches
from shared.models.base import Model
from shared.protocol.messages import Hyper


def epochs(batches: Batches) -> Iterator[Iterator[Batch]]:
    """Yield one iterator of batches per epoch; each must be exhausted before the next is requested."""
    flow = iter(batches)
    for first in flow:
        yield _epoch(first, flow, batches.num_examples)


def _epoch(first: Batch, flow: Iterator[Batch], count: int) -> Iterator[Batch]:
    examples = len(first[1])
    yield first
    while examples < count:
        try:
            batch = next(flow)
        except StopIteration:
            return
        examples += len(batch[1])
        yield batch


@dataclass
class Tally:
    """Mean loss over several calls of SGD.

    Attributes:
        seen: Examples so far, each as often as it was trained on.
        total: Sum of their losses.
    """

    seen: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean loss per example; None without an example."""
        return self.total / self.seen if self.seen else None

    def train(
        self, model: Model, batches: Iterable[Batch], hyper: Hyper, *, correct: Callable[[], None] | None = None
    ) -> None:
        """Train all weights by SGD with a momentum that starts at zero; `correct` as in `descend_batches`."""
        before, weights = self.seen, list(model.layers.named_parameters())
        counted = self._count_examples(batches)
        loss = descend_batches(model.layers, weights, counted, hyper, model.objective, correct=correct)
        self.total += 0.0 if loss is None else loss * (self.seen - before)

    def _count_examples(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.seen += len(batch[1])
            yield batch
