"""Plan tables `[hyper]` and `[early_stopping]`: local training on devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Literal

import msgspec

from edge_server.plan.sections import Chosen, Section
from shared.protocol.messages import PLAIN_STEP, Hyper, SgdOptions, StepOptions
from shared.protocol.objective import ObjectiveSpec

BASE_KEYS = tuple(SgdOptions.__struct_fields__)
STEP_KEYS = tuple(StepOptions.__struct_fields__)
ADAM_KEYS = ("beta1", "beta2", "eps")
SCHEDULE_KEYS = {"step_rounds": "step", "step_factor": "step"}
"""Keys that one schedule reads."""


class HyperPlan(SgdOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local training on a device.

    Keys with the default `absent` are not written to records unless they are given, as in older versions.

    Attributes:
        local_epochs: Passes over a device's examples in a round; 0: no training.
        batch_size: Examples per training step.
        learning_rate: Step size.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: Share of each weight that is added to its gradient; with `adamw`, times the learning rate, by
            which the weight itself shrinks.
        optimizer: Rule of a step, as in PyTorch; absent: `sgd`. The moments of `adam` and `adamw` begin at zero in
            every task.
        beta1: Decay of Adam's mean of gradients, in [0, 1); absent: 0.9.
        beta2: Decay of Adam's mean of squared gradients, in [0, 1); absent: 0.999.
        eps: Term in the denominator of Adam's step; absent: 1e-8.
        clip_norm: Norm to which the gradient of a step, proximal terms included, is scaled down; absent or 0: none.
        precision: Type of forward pass and gradients (autocast): `bfloat16` on processors and GPUs with instructions
            for it, `float16` on NVIDIA GPUs; other devices train in `float32`, and the journal notes it. Absent:
            `float32`. Parameters are always of 32 bits.
        schedule: Learning rate over the rounds of the run: `cosine` falls to near zero at the last round, `step`
            multiplies it by `step_factor` every `step_rounds` rounds; absent: `constant`.
        warmup_rounds: Rounds before the schedule, in which the learning rate rises linearly; absent: 0.
        step_rounds: Rounds from one fall to the next of the schedule `step`; absent: 10.
        step_factor: Factor of each fall of the schedule `step`, above 0 and at most 1; absent: 0.1.
    """

    optimizer: Literal["sgd", "adam", "adamw"] | msgspec.UnsetType = msgspec.UNSET
    beta1: float | msgspec.UnsetType = msgspec.UNSET
    beta2: float | msgspec.UnsetType = msgspec.UNSET
    eps: float | msgspec.UnsetType = msgspec.UNSET
    clip_norm: float | msgspec.UnsetType = msgspec.UNSET
    precision: Literal["float32", "bfloat16", "float16"] | msgspec.UnsetType = msgspec.UNSET
    schedule: Literal["constant", "cosine", "step"] | msgspec.UnsetType = msgspec.UNSET
    warmup_rounds: int | msgspec.UnsetType = msgspec.UNSET
    step_rounds: int | msgspec.UnsetType = msgspec.UNSET
    step_factor: float | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Reject values out of range, and keys that the chosen optimizer or schedule does not read."""
        super().__post_init__()
        step = self.step
        if step.optimizer == "sgd":
            self._require_absent(ADAM_KEYS, "optimizer", "adam")
        elif self.momentum:
            raise ValueError(f"momentum is {self.momentum}: that of SGD; set beta1 for {step.optimizer}")
        self._require_absent([key for key, kind in SCHEDULE_KEYS.items() if kind != self.schedule], "schedule", "step")
        if (self.warmup_rounds or 0) < 0 or not (self.step_rounds or 1) >= 1:
            raise ValueError("warmup_rounds must be at least 0, step_rounds at least 1")
        if not 0 < (1.0 if self.step_factor is msgspec.UNSET else self.step_factor) <= 1:
            raise ValueError(f"step_factor is {self.step_factor}: give a factor above 0 and at most 1")

    def _require_absent(self, keys: Iterable[str], chosen_by: str, choice: str) -> None:
        if present := [key for key in keys if getattr(self, key) is not msgspec.UNSET]:
            raise ValueError(f"{present[0]} is set, and only {chosen_by} = {choice!r} reads it; remove it, or set that")

    @property
    def step(self) -> StepOptions:
        """Options of a training step."""
        return StepOptions(**{key: value for key in STEP_KEYS if (value := getattr(self, key)) is not msgspec.UNSET})

    def of_round(self, number: int, rounds: int) -> Hyper:
        """Return the hyperparameters of a task, with the learning rate that the schedule gives a round.

        Args:
            number: The round, from 1; tasks beside the rounds may have others.
            rounds: Rounds of the whole run.
        """
        values = {key: getattr(self, key) for key in BASE_KEYS}
        values["learning_rate"] *= self.rate_factor(min(max(number, 1), rounds), rounds)
        step = self.step
        return Hyper(**values, step_options=step if step != PLAIN_STEP else msgspec.UNSET)

    @property
    def is_scheduled(self) -> bool:
        """True if the learning rate differs between rounds."""
        return bool(self.warmup_rounds) or (self.schedule or "constant") != "constant"

    def rate_factor(self, number: int, rounds: int) -> float:
        """Return the share of the learning rate in a round, above 0 and at most 1."""
        warmup = self.warmup_rounds or 0
        if number <= warmup:
            return number / (warmup + 1)
        past = number - warmup - 1
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * past / (rounds - warmup))) / 2
        if self.schedule == "step":
            factor = 0.1 if self.step_factor is msgspec.UNSET else self.step_factor
            return max(float(factor ** (past // (self.step_rounds or 10))), sys.float_info.min)
        return 1.0


class TaskPlan(ObjectiveSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning task: kind, loss and metrics; absent: classification by cross-entropy.

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
        """Objective that tasks carry, with the same fields."""
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
