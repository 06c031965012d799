"""Trial plan: the TOML file that defines a run.

`REFERENCE.md` lists every key.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from edge_server.plan.budget import BudgetPlan
from edge_server.plan.devices import MAX_DEVICES, DevicePlan, expand_devices
from edge_server.plan.emulation import EmulationPlan
from edge_server.plan.evaluation import EvaluationPlan, MeasurePlan
from edge_server.plan.network import LoraPlan, ModelPlan
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.plan.partition import PartitionPlan
from edge_server.plan.replay import ReplayPlan
from edge_server.plan.sections import Chosen, Section
from edge_server.plan.sites import SitesPlan
from edge_server.plan.training import EarlyStoppingPlan, HyperPlan, TaskPlan
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.adaptation import NetworkAdaptation
from shared.protocol.messages import Hyper
from shared.protocol.objective import CLASSIFICATION_SPEC, ObjectiveSpec

MAX_OVER_SELECTION = 10


class FallbackPlan(Section, frozen=True, kw_only=True):
    """Replaces the plan's sections of the same names if the path of the plan's data does not exist.

    Attributes:
        data: Data that need no download.
        server_data: Labelled examples for training on the server, that need no download.
        model: Network for these data; absent: that of the plan.
        algorithm: Method for these data; absent: that of the plan.
        task: Learning task on these data; absent: that of the plan.
        hyper: Options of local training for these data; absent: those of the plan.
        optimizer: Resource allocation for these data; absent: that of the plan.
    """

    data: Data
    server_data: Data | None = None
    model: ModelPlan | None = None
    algorithm: Chosen | None = None
    task: TaskPlan | msgspec.UnsetType = msgspec.UNSET
    hyper: HyperPlan | None = None
    optimizer: OptimizerPlan | None = None


class CohortPlan(Section, frozen=True, kw_only=True):
    """Selection of the devices of a round.

    Attributes:
        size: Updates that a round needs, of which `[round] quorum` is a share; 0: one from every connected device.
        over_selection: Devices selected beyond `size`, as a share of it, to avoid waiting for the slowest; the round
            ends with the first `size` updates, and later ones are late.
        min_devices: Devices that must be connected before a round starts.
        wait_s: Time to wait for them before the round counts as missed; before the first round a server keeps waiting,
            and warns each time.
    """

    size: int = 0
    over_selection: float = 0.0
    min_devices: int = 1
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if self.size < 0 or self.min_devices < 1 or not 0 < self.wait_s < math.inf:
            raise ValueError("size must be >= 0, min_devices >= 1, wait_s > 0 and finite")
        if not 0 <= self.over_selection <= MAX_OVER_SELECTION or (self.over_selection and not self.size):
            raise ValueError(f"over_selection must be 0 to {MAX_OVER_SELECTION}, and requires a size > 0")


class RoundPlan(Section, frozen=True, kw_only=True):
    """End of a round: deadline, quorum, reaction to failures.

    Attributes:
        deadline_s: Time after which updates no longer count.
        quorum: Share of the cohort whose updates end the round immediately.
        min_updates: With fewer updates the model is unchanged, and the round counts as missed.
        on_missed: Reaction to a missed round: `retry` repeats it with the same number, after a pause of 1 s that
            doubles up to `deadline_s` while it is missed again; `continue` starts the next one, and the run loses one
            round; `stop` ends the run. A replay, where nothing can recover, repeats a round 3 times. After three
            misses in a row because training diverged (a loss or a parameter is not finite), or one with `stop`, the
            run returns to its last good model; if that does not help, it ends as `diverged`.
        most_missed: Share of a run's rounds that may be missed; with more, the run ends with exit code 1.
        most_norm: Updates whose norm exceeds both the norm of the model and this many times the round's median are
            left out of the aggregate; so are features at a cut that are more than 5 times, or this many times, as large
            as the median of their step, and a neighbouring site's model that is too far from this site's. 0: no limit.
        most_examples: Updates that claim more examples than this many times the round's median are left out; 0: no
            limit.
        step_deadline_s: Time after the first activations of a split step at which it continues with the devices that
            have delivered.
    """

    deadline_s: float = 120.0
    quorum: float = 1.0
    min_updates: int = 1
    on_missed: Literal["retry", "continue", "stop"] = "retry"
    most_missed: float = 0.1
    most_norm: float = 30.0
    most_examples: float = 100.0
    step_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if not 0 < self.deadline_s < math.inf or not 0 < self.quorum <= 1 or self.min_updates < 1:
            raise ValueError("deadline_s must be > 0 and finite, quorum in (0, 1], min_updates >= 1")
        if not 0 < self.step_deadline_s < math.inf or not 0 <= self.most_missed <= 1:
            raise ValueError("step_deadline_s must be > 0 and finite, most_missed 0 to 1")
        if not all(most == 0 or 1 <= most < math.inf for most in (self.most_norm, self.most_examples)):
            raise ValueError("most_norm and most_examples must be >= 1 and finite, or 0 for no bound")


class Plan(Section, frozen=True, kw_only=True):
    """Top level of the file; each table has a section below.

    Attributes:
        name: Name of the trial; runs are named after it.
        rounds: Number of rounds of the run.
        seed: Seed of everything random: initial model, cohorts, batches.
        algorithm: Learning method, by name, with its options.
        project: Project with the plan's own code: the folder of the plan on this machine, and the published version on
            boards that list it; see `edge-server new`.
        early_stopping: When devices leave the run for good, also of the fallback's algorithm; with fedmp, fedselect,
            fedspu, fjord, fjord_fixed, hermes, local_only, prunefl and random_dropout.
        model: Network, by name, with its options; `module:function` for a network of yours that the server's file and
            each agent's file list under `plugins`, like any other plugin.
        lora: Low-rank adapters that are trained in place of the network; absent: none.
        task: Learning task: kind, loss, metrics.
        codec: Encoding of updates, by name, with its options.
        cut_codec: Codec of the activations and gradients of split learning.
        hyper: Options of local training on the devices.
        cohort: Selection of the devices of a round.
        round: End of a round: deadline, quorum, reaction to failures.
        evaluation: When models are evaluated.
        measure: Measurement on the devices before the first round.
        data: Source of the examples for local agents, replay and the server's test set. May be absent if the gateway
            has no data and the devices have theirs; `[evaluation] every` is then 0.
        server_data: Labelled examples that the server trains on, for methods in which it does; examples that it draws
            from the devices' data set are left out there.
        partition: How local agents and replayed devices share that data.
        budget: Limits of the whole run.
        sites: Assignment of devices to edge servers, if there are several.
        replay: Computation of a replay.
        emulation: Which tables of `[[device]]` are emulated for agents on this machine; absent: none.
        optimizer: Assigns resources to each device in a round; absent: every device gets the same.
        fallback: Replacement sections if the data of the plan do not exist.
        device: Devices of local trials and of replay; if there are any, a live run uses only these.
        local: Number of agents that `trial run` starts on this machine without `--local`; 0: the connected fleet.
    """

    name: str
    rounds: int
    algorithm: Chosen
    model: ModelPlan
    data: Data | msgspec.UnsetType = msgspec.UNSET
    project: str | msgspec.UnsetType = msgspec.UNSET
    early_stopping: EarlyStoppingPlan | msgspec.UnsetType = msgspec.UNSET
    server_data: Data | msgspec.UnsetType = msgspec.UNSET  # UNSET: not written to records, as in older versions
    task: TaskPlan | msgspec.UnsetType = msgspec.UNSET
    lora: LoraPlan | msgspec.UnsetType = msgspec.UNSET
    seed: int = 0
    local: int = 0
    codec: Chosen = Chosen(name="dense")
    cut_codec: Chosen = Chosen(name="dense")
    hyper: HyperPlan = HyperPlan()
    cohort: CohortPlan = CohortPlan()
    round: RoundPlan = RoundPlan()
    evaluation: EvaluationPlan = EvaluationPlan()
    measure: MeasurePlan = MeasurePlan()
    partition: PartitionPlan = PartitionPlan()
    budget: BudgetPlan = BudgetPlan()
    sites: SitesPlan | msgspec.UnsetType = msgspec.UNSET
    replay: ReplayPlan = ReplayPlan()
    emulation: EmulationPlan | msgspec.UnsetType = msgspec.UNSET
    optimizer: OptimizerPlan | None = None
    fallback: FallbackPlan | None = None
    device: list[DevicePlan] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Move early stopping into the algorithm's options; without data, disable the server's evaluation."""
        if (count := sum(max(1, device.count) for device in self.device)) > MAX_DEVICES:
            raise ValueError(f"device: {count} devices; at most {MAX_DEVICES} are allowed")
        chosen: Chosen = self.model  # a plan built by code may have a plain choice
        if not isinstance(chosen, ModelPlan):
            msgspec.structs.force_setattr(self, "model", ModelPlan(name=chosen.name, options=chosen.options))
        if not self.data:
            self._evaluate_nothing()
        if not self.early_stopping:
            return
        stopping, fallback = self.early_stopping, self.fallback
        msgspec.structs.force_setattr(self, "early_stopping", msgspec.UNSET)
        msgspec.structs.force_setattr(self, "algorithm", stopping.merge_into(self.algorithm))
        if fallback and fallback.algorithm:
            instead = msgspec.structs.replace(fallback, algorithm=stopping.merge_into(fallback.algorithm))
            msgspec.structs.force_setattr(self, "fallback", instead)

    def hyper_of(self, number: int) -> Hyper:
        """Return the hyperparameters of local training in a round."""
        return self.hyper.of_round(number, self.rounds)

    @property
    def objective(self) -> ObjectiveSpec:
        """Objective that the run trains for."""
        return self.task.bare if self.task else CLASSIFICATION_SPEC

    @property
    def task_objective(self) -> ObjectiveSpec | None:
        """Objective that tasks carry; None for the default, which agents of all versions know."""
        return None if self.objective == CLASSIFICATION_SPEC else self.objective

    @property
    def adaptation(self) -> NetworkAdaptation | None:
        """Frozen parts and adapters of the network; None if devices train all of it."""
        frozen, lora = self.model.freeze or (), self.lora or None
        return NetworkAdaptation(frozen=frozen, lora=lora) if frozen or lora else None

    def _evaluate_nothing(self) -> None:
        """Disable the server's evaluation."""
        if self.evaluation.every > 1 or self.fallback:
            raise ValueError("evaluation.every or fallback is set in a plan without [data]; add [data], or remove them")
        msgspec.structs.force_setattr(self, "evaluation", msgspec.structs.replace(self.evaluation, every=0))


def is_same_plan(begun: Plan, plan: Plan) -> bool:
    """Compare a run's plan with `plan`; accepts runs of versions whose only `on_missed` was "continue"."""
    if (begun.round.on_missed, plan.round.on_missed) == ("continue", "retry"):
        begun = msgspec.structs.replace(begun, round=msgspec.structs.replace(begun.round, on_missed="retry"))
    return begun == plan


def plan_differences(begun: Plan, plan: Plan) -> list[str]:
    """Return the keys in which a plan differs from a run's, one per line: `round.deadline_s: 60.0 -> 90.0`."""
    before, after = (_flatten("", msgspec.to_builtins(version)) for version in (begun, plan))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}" for key in keys]


def _flatten(place: str, value: Any) -> dict[str, Any]:
    """Flatten nested tables and arrays to values by dotted key."""
    if isinstance(value, dict):
        parts = [(f"{place}.{key}".lstrip("."), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {place: value}
    return {key: leaf for name, item in parts for key, leaf in _flatten(name, item).items()}


def devices(plan: Plan, count: int = 0) -> list[DevicePlan]:
    """Return `count` devices: first those of the plan, then generated ones; 0 for only those of the plan.

    Raises:
        ConfigError: There is no device, or fewer than `cohort.min_devices`.
    """
    if not plan.device and not count:
        raise ConfigError(
            f"plan {plan.name!r} has no device; add [[device]], or --local N to a trial, --devices N to a replay"
        )
    named = expand_devices(plan.device)[: count or None]
    fleet = [*named, *(DevicePlan(name=f"device-{index}") for index in range(len(named), count))]
    least = plan.cohort.min_devices
    if count < 0 or len(fleet) < least:
        raise ConfigError(
            f"{count or len(fleet)} devices: plan {plan.name!r} waits for cohort.min_devices = {least}; lower that"
        )
    return fleet
