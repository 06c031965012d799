"""One step of local training: clip the gradients, then SGD, Adam or AdamW."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shared.protocol.messages import Hyper
from shared.tensors.adam import adam_step
from shared.tensors.sgd import clip_gradients, descend
from shared.tensors.tree import Tree


def take_step(weights: Sequence[tuple[str, Tensor]], memory: Tree, hyper: Hyper) -> None:
    """Take the step that the hyperparameters describe; the gradients are consumed.

    Args:
        weights: Parameters by name, changed in place; those without a gradient stay unchanged.
        memory: Momentum or moments, updated at every step; empty before the first.
    """
    options = hyper.step
    if options.clip_norm:
        clip_gradients(weights, options.clip_norm)
    if options.optimizer == "sgd":
        descend(weights, memory, hyper)
    else:
        adam_step(weights, memory, hyper)
