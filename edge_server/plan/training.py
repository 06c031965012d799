"""Plan tables `[hyper]` and `[early_stopping]`: local training on devices."""

from __future__ import annotations

import msgspec

from edge_server.plan.sections import Chosen, Section
from shared.protocol.messages import Hyper


class HyperPlan(Hyper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local training on a device.

    Attributes:
        local_epochs: Passes over a device's examples in a round; 0 trains nothing.
        batch_size: Examples of a training step.
        learning_rate: Step size of SGD.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: Share of each weight that is added to its gradient.
    """


class EarlyStoppingPlan(Section, frozen=True, kw_only=True):
    """Early stopping: a device whose own loss L gets worse leaves for good; absent: none does.

    Attributes:
        share: Lambda, share of the mean training loss in L, 0 to 1; the rest is the loss on `[data] validation`. A
            device without validation examples goes by its training loss alone.
        min_alive: The run ends when fewer devices than that have not left; FedSPU's authors take 10.
    """

    share: float = 0.7
    min_alive: int = 1

    def __post_init__(self) -> None:
        """Refuse a share that is none, and a run without devices."""
        if not 0 <= self.share <= 1 or self.min_alive < 1:
            raise ValueError("share must be 0 to 1, min_alive >= 1")

    def merge_into(self, algorithm: Chosen) -> Chosen:
        """Return a method with this among its options, where tasks, records and plans of before have it.

        Raises:
            ValueError: The method has such options of its own.
        """
        if twice := algorithm.options.keys() & {"early_stopping", *self.__struct_fields__}:
            raise ValueError(f"[early_stopping] stands beside the algorithm's option {min(twice)}: take out the option")
        fields = {field.name: field.default for field in msgspec.structs.fields(self)}
        changed = {name: getattr(self, name) for name, usual in fields.items() if getattr(self, name) != usual}
        return msgspec.structs.replace(algorithm, options={**algorithm.options, "early_stopping": True, **changed})
