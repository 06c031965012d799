"""The server's supervised steps on a whole network: the same labelled batches and views as SemiSFL's own.

Y. Xu et al. SemiSFL, https://arxiv.org/abs/2307.15870, compare with methods whose devices train the whole network, at
as many supervised steps of as many examples; so that a difference is not one of batches, these are drawn alike. The
loss is the method's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor
from torch.nn import functional

from shared.algorithms.base import Batch, Cohort
from shared.algorithms.semisupervised.full_model.network_steps import Descent, Objective
from shared.algorithms.semisupervised.round_terms import SUPERVISED, begun
from shared.algorithms.semisupervised.semisfl_server import labelled_batches, require_classes
from shared.algorithms.semisupervised.settings import SteppedSettings
from shared.errors import ConfigError
from shared.models.base import Model
from shared.protocol.messages import Scalar


def labelled_views(
    settings: SteppedSettings, model: Model, labelled: Batch, cohort: Cohort, number: int, *, first: bool
) -> Iterator[Batch]:
    """Yield a view of a batch of labelled examples and their labels, for each supervised step of a round.

    Args:
        settings: How many steps, of how many examples, and which views.
        model: The whole network, without storage.
        labelled: The server's own examples.
        first: Whether it is the first that trains, which takes the steps of warm-up too.

    Raises:
        ConfigError: A class has no example, or there is a class that the network does not know.
    """
    require_classes(model, labelled)
    steps = settings.supervised_steps + (settings.warmup_steps if first else 0)
    for (view,), labels in itertools.islice(labelled_batches(settings, labelled, cohort, number), steps):
        yield view, labels


def supervise(
    descent: Descent,
    views: Iterable[Batch],
    network: Callable[[Tensor], Tensor],
    facts: Mapping[str, Scalar],
    after: Callable[[], None] = lambda: None,
) -> dict[str, Scalar]:
    """Take a step down the cross-entropy of each batch; return facts as the round begins with them.

    Args:
        views: Of labelled examples, a batch a step.
        network: Returns the outputs of a batch, of shape (B, classes).
        facts: The state's before the round.
        after: What follows each step.

    Raises:
        ConfigError: Training diverges.
    """
    objectives = (Objective(functional.cross_entropy(network(view), labels), len(labels)) for view, labels in views)
    taken = descent.take(objectives, require=_require_finite, after=after)
    means = {} if taken.loss is None else {SUPERVISED: taken.loss}
    return begun(facts, taken.steps, means)


def _require_finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise ConfigError(f"server_data: training has diverged, the loss of step {step} is {loss}: lower learning_rate")
    return loss
