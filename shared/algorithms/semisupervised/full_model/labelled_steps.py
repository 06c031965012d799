"""Supervised training steps of the server, on the unsplit network and SemiSFL's labelled batches.

Y. Xu et al. SemiSFL, https://arxiv.org/abs/2307.15870, compare with methods whose devices train the whole network, with
equally many supervised steps and examples. Batches are drawn alike, so that they cause no difference. The loss is the
method's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor
from torch.nn import functional

from shared.algorithms.base import Batch, Cohort
from shared.algorithms.semisupervised.full_model.network_steps import Descent, StepLoss
from shared.algorithms.semisupervised.round_terms import SUPERVISED, begin_terms
from shared.algorithms.semisupervised.semisfl_server import labelled_batches, require_classes
from shared.algorithms.semisupervised.settings import SteppedSettings
from shared.errors import ConfigError
from shared.models.base import Model
from shared.protocol.messages import Scalar


def labelled_views(
    settings: SteppedSettings, model: Model, labelled: Batch, cohort: Cohort, number: int, *, first: bool
) -> Iterator[Batch]:
    """Yield a view of a labelled batch and its labels, for each supervised step of a round.

    Args:
        model: The whole network, without storage.
        first: Whether this is the first training, which includes the warm-up steps.

    Raises:
        ConfigError: A class has no example, or is unknown to the network.
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
    """Take a step down the cross-entropy of each batch; return the facts for the start of the round.

    Args:
        network: From a batch to outputs of shape (B, classes).
        facts: The state's before the round.

    Raises:
        ConfigError: Training diverges.
    """
    objectives = (StepLoss(functional.cross_entropy(network(view), labels), len(labels)) for view, labels in views)
    summary = descent.take(objectives, require=_require_finite, after=after)
    means = {} if summary.loss is None else {SUPERVISED: summary.loss}
    return begin_terms(facts, summary.steps, means)


def _require_finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise ConfigError(f"server_data: training has diverged, the loss of step {step} is {loss}: lower learning_rate")
    return loss
