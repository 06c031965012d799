"""How much arithmetic one training step of a network is: counted from its shapes, without running it."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from shared.models.build import blank
from shared.protocol.messages import Spec


def step_flops(
    spec: Spec, example: torch.Size, batch_size: int, *, trains: bool = True, below: int | None = None
) -> int:
    """Return the floating-point operations of one step: forward and, if it trains, backward of one batch.

    Products of matrices and convolutions count, a multiplication with its addition as 2; what works element by element
    does not. Nothing is computed and no tensor takes memory.

    Args:
        spec: The network.
        example: Shape of one input, without the batch.
        batch_size: Examples in a batch.
        trains: Whether there is a backward pass; an evaluation has none.
        below: Of how many layers from the first on; None for all of them.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    network = blank(spec).layers.train()[:below]
    with torch.device("meta"):
        inputs = torch.empty((batch_size, *example))
        labels = torch.empty(batch_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        outputs = network(inputs)
        loss = functional.cross_entropy(outputs, labels) if below is None else outputs.sum()
        if trains:
            loss.backward()
    return int(counter.get_total_flops())
