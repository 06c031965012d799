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
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.plan.partition import PartitionPlan
from edge_server.plan.replay import ReplayPlan
from edge_server.plan.sections import Chosen, Section
from edge_server.plan.sites import SitesPlan
from edge_server.plan.training import EarlyStoppingPlan, HyperPlan
from shared.data.spec import Data
from shared.errors import ConfigError

MAX_OVER_SELECTION = 10


class FallbackPlan(Section, frozen=True, kw_only=True):
    """Takes the place of the plan's sections of these names if the path of its data does not exist.

    Attributes:
        data: Other data, which need no download.
        server_data: Other labelled examples of the server's own.
        model: The network for these data; the plan's own where left out.
        algorithm: The method for these data; the plan's own where left out.
        hyper: Options of local training for these data; the plan's own where left out.
        optimizer: The allocation of resources for these data; the plan's own where left out.
    """

    data: Data
    server_data: Data | None = None
    model: Chosen | None = None
    algorithm: Chosen | None = None
    hyper: HyperPlan | None = None
    optimizer: OptimizerPlan | None = None


class CohortPlan(Section, frozen=True, kw_only=True):
    """Which devices take part.

    Attributes:
        size: Updates a round needs, of which `[round] quorum` is a share; 0 for one of every device that is connected.
        over_selection: Devices asked beyond `size`, as a share of it, so that the slowest need not be waited for; the
            round ends with the first `size` updates, and those that come later are late.
        min_devices: Devices that must be connected before a round begins.
        wait_s: Time to wait for them before the round counts as missed; before the first round a server waits on, and
            warns as often.
    """

    size: int = 0
    over_selection: float = 0.0
    min_devices: int = 1
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse a cohort that nobody could be in."""
        if self.size < 0 or self.min_devices < 1 or not 0 < self.wait_s < math.inf:
            raise ValueError("size must be >= 0, min_devices >= 1, wait_s > 0 and finite")
        if not 0 <= self.over_selection <= MAX_OVER_SELECTION or (self.over_selection and not self.size):
            raise ValueError(
                f"over_selection must be 0 to {MAX_OVER_SELECTION}, and needs a size of which it is a share"
            )


class RoundPlan(Section, frozen=True, kw_only=True):
    """How a round ends.

    Attributes:
        deadline_s: Time after which late updates no longer count.
        quorum: Share of the cohort whose updates end the round at once.
        min_updates: With fewer updates the model stays as it is, and the round counts as missed.
        on_missed: What follows a missed round: `retry` repeats it under its own number, after a pause of 1 s that
            doubles up to `deadline_s` while it is missed again; `continue` begins the next one, and one round of the
            run is lost; `stop` ends the run. A replay, in which nobody mends anything, repeats a round 3 times.
        most_missed: Share of a run's rounds that may be missed; with more, the run ends with code 1 and says so.
        most_diverged: Rounds, or tries of one, in a row that are missed since training diverged (a loss or a parameter
            is not finite), after which the run goes back to its last good model; it ends as `diverged` where it comes
            no further from there.
        most_norm: Updates whose norm is larger than this many times the round's median, and than that of the model
            itself, are left out of the aggregate; likewise features at a cut that are more than 5 times, or this many,
            as large as the median of their step, and a neighbouring site's model that is too far from this site's.
            0: none is.
        most_examples: Updates that claim more examples than this many times the round's median are left out; 0: none.
        step_deadline_s: Time after the first activations of a split step at which it continues with the devices that
            have delivered.
    """

    deadline_s: float = 120.0
    quorum: float = 1.0
    min_updates: int = 1
    on_missed: Literal["retry", "continue", "stop"] = "retry"
    most_missed: float = 0.1
    most_diverged: int = 3
    most_norm: float = 30.0
    most_examples: float = 100.0
    step_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse a round that could not end."""
        if not 0 < self.deadline_s < math.inf or not 0 < self.quorum <= 1 or self.min_updates < 1:
            raise ValueError("deadline_s must be > 0 and finite, quorum in (0, 1], min_updates >= 1")
        if not 0 < self.step_deadline_s < math.inf or not 0 <= self.most_missed <= 1:
            raise ValueError("step_deadline_s must be > 0 and finite, most_missed 0 to 1")
        if self.most_diverged < 1:
            raise ValueError("most_diverged must be >= 1")
        if not all(most == 0 or 1 <= most < math.inf for most in (self.most_norm, self.most_examples)):
            raise ValueError("most_norm and most_examples must be >= 1 and finite, or 0 for no bound")


class Plan(Section, frozen=True, kw_only=True):
    """Keys of the whole trial; each table has a section of its own below.

    Attributes:
        name: Name of the trial; runs are named after it.
        rounds: How many rounds the run has.
        seed: Seed of everything random: initial model, cohorts, batches.
        algorithm: The learning method, by name, with its options.
        early_stopping: When devices leave for good, also of the fallback's algorithm; with fedmp, fedselect, fedspu,
            fjord, fjord_fixed, hermes, local_only, prunefl and random_dropout.
        model: The network, by name, with its options; `module:function` for one of your own, where the server's file
            and each agent's list it under `models`.
        codec: How an update travels, by name, with its options.
        cut_codec: Codec of the activations and gradients of split learning.
        hyper: Options of local training on the devices.
        cohort: Which devices take part.
        round: How a round ends.
        evaluation: When models are evaluated.
        measure: What is measured on the devices before the first round.
        data: Where examples come from, for local agents, replay and the server's test set. May be left out where the
            gateway has none and the devices bring theirs; `[evaluation] every` is then 0.
        server_data: Labelled examples that the server itself trains on, for methods in which it does; those that it
            draws of the devices' own data set are left out there.
        partition: How local agents and replayed devices share that data.
        budget: What the whole run may take.
        sites: Which edge server has which devices, where there are several.
        replay: How a replay computes.
        emulation: What of their tables `[[device]]` agents on this machine are held to; absent: nothing.
        optimizer: What decides how much each device is given in a round; absent: every device is given the same.
        fallback: What the plan trains with where its data is not there.
        device: Devices of local trials and of replay; a live run uses these alone, where there are any.
        local: Agents that `trial run` starts on this machine unless `--local` says otherwise; 0 for the connected
            fleet.
    """

    name: str
    rounds: int
    algorithm: Chosen
    model: Chosen
    data: Data | msgspec.UnsetType = msgspec.UNSET
    early_stopping: EarlyStoppingPlan | msgspec.UnsetType = msgspec.UNSET
    server_data: Data | msgspec.UnsetType = msgspec.UNSET  # records of plans without it are those of versions before
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
        """Move early stopping into the options of the method, so that a plan has one form; likewise what lacks data."""
        if (count := sum(max(1, device.count) for device in self.device)) > MAX_DEVICES:
            raise ValueError(f"device: {count} in all; name at most {MAX_DEVICES}")
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

    def _evaluate_nothing(self) -> None:
        """Have the server of a plan without data evaluate nothing."""
        if self.evaluation.every > 1 or self.fallback:
            raise ValueError("evaluation.every or fallback stands in a plan without [data]; add that, or take them out")
        msgspec.structs.force_setattr(self, "evaluation", msgspec.structs.replace(self.evaluation, every=0))


def is_same_plan(begun: Plan, plan: Plan) -> bool:
    """Tell whether a run was begun with a plan; before rounds were repeated, missed ones were passed over unasked."""
    if (begun.round.on_missed, plan.round.on_missed) == ("continue", "retry"):
        begun = msgspec.structs.replace(begun, round=msgspec.structs.replace(begun.round, on_missed="retry"))
    return begun == plan


def plan_differences(begun: Plan, plan: Plan) -> list[str]:
    """Return where a plan differs from that of a run, as `round.deadline_s: 60.0 -> 90.0`, a key a line.

    Args:
        plan: What is to be done now.
    """
    before, after = (_flatten("", msgspec.to_builtins(version)) for version in (begun, plan))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}" for key in keys]


def _flatten(place: str, value: Any) -> dict[str, Any]:
    """Return the values of a nest of tables and arrays by their places."""
    if isinstance(value, dict):
        parts = [(f"{place}.{key}".lstrip("."), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {place: value}
    return {key: leaf for name, item in parts for key, leaf in _flatten(name, item).items()}


def devices(plan: Plan, count: int = 0) -> list[DevicePlan]:
    """Return `count` devices: the plan's own, then made-up ones; 0 for just the plan's own.

    Raises:
        ConfigError: None are named and no count is given, or no round would begin with so few.
    """
    if not plan.device and not count:
        raise ConfigError(f"plan {plan.name!r} names no device; add [[device]] sections or give --local N")
    named = expand_devices(plan.device)[: count or None]
    fleet = [*named, *(DevicePlan(name=f"device-{index}") for index in range(len(named), count))]
    least = plan.cohort.min_devices
    if count < 0 or len(fleet) < least:
        raise ConfigError(
            f"{count or len(fleet)} devices: plan {plan.name!r} waits for cohort.min_devices = {least}; lower that"
        )
    return fleet
