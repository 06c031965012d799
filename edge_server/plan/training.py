"""Plan tables `[hyper]` and `[early_stopping]`: local training on devices."""

from __future__ import annotations

import msgspec

from edge_server.plan.sections import Chosen, Section
from shared.protocol.messages import Hyper
from shared.protocol.objective import ObjectiveSpec


class HyperPlan(Hyper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local training on a device.

    Attributes:
        local_epochs: Passes over a device's examples in a round; 0: no training.
        batch_size: Examples per training step.
        learning_rate: Step size of SGD.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: Share of each weight that is added to its gradient.
    """


class TaskPlan(ObjectiveSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the network learns: kind of task, loss and metrics; absent: classification by cross-entropy.

    Attributes:
        kind: `classification` into one class each; `multilabel`, several yes-no labels; `regression` of numbers;
            `forecast` of later numbers of a series; `segmentation`, a class for each pixel; `anomaly`, by an
            autoencoder's reconstruction error; `custom`, by a loss and metrics of your own.
        loss: `cross_entropy`, `binary_cross_entropy`, `mse`, `mae`, `huber` (option `delta`), `quantile` (option `q`),
            `dice`, or `module:attribute`: a function of outputs and targets that returns one loss per example, or
            their mean. Empty: that of the kind.
        loss_options: Options of the loss.
        metrics: `accuracy`, `balanced_accuracy`, `macro_f1`, `auroc`, `iou`, `mae`, `rmse`, `r2`, `quantile_loss`, or
            `module:attribute`: a function of outputs and targets, as numpy arrays, that returns one value per example.
            Empty: those of the kind.
        target: The metric by which models are compared, and the value at which the run ends.
        class_weights: Weight of each class in the default loss, in class order.
        label_smoothing: Share of the probability that the default loss spreads over all classes, in [0, 1).
    """

    @property
    def bare(self) -> ObjectiveSpec:
        """The same fields as tasks carry them."""
        return ObjectiveSpec(**{name: getattr(self, name) for name in ObjectiveSpec.__struct_fields__})


class EarlyStoppingPlan(Section, frozen=True, kw_only=True):
    """Early stopping: a device whose local loss L gets worse leaves the run for good; absent: none does.

    Attributes:
        share: Lambda, weight of the mean training loss in L, 0 to 1; the rest is the loss on `[data] validation`. A
            device without validation examples uses its training loss alone.
        min_alive: The run ends when fewer devices remain; FedSPU's authors use 10.
    """

    share: float = 0.7
    min_alive: int = 1

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if not 0 <= self.share <= 1 or self.min_alive < 1:
            raise ValueError("share must be 0 to 1, min_alive >= 1")

    def merge_into(self, algorithm: Chosen) -> Chosen:
        """Return the algorithm with these settings among its options, as in tasks, records and older plans.

        Raises:
            ValueError: The algorithm sets such an option itself.
        """
        if twice := algorithm.options.keys() & {"early_stopping", *self.__struct_fields__}:
            raise ValueError(
                f"[early_stopping] and the algorithm's option {min(twice)} are both set; remove the option"
            )
        fields = {field.name: field.default for field in msgspec.structs.fields(self)}
        changed = {name: getattr(self, name) for name, usual in fields.items() if getattr(self, name) != usual}
        return msgspec.structs.replace(algorithm, options={**algorithm.options, "early_stopping": True, **changed})
