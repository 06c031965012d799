"""A trial plan: everything that decides what a run does, in one TOML file. `REFERENCE.md` has every key.

What a plan trains with where its data is not there, so that an example runs everywhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from edge_server.plan.devices import MAX_DEVICES, DevicePlan, expanded, rooted
from edge_server.plan.devices import check as check_devices
from edge_server.plan.emulation import EmulationPlan
from edge_server.plan.emulation import check as check_emulation
from edge_server.plan.sections import (
    BudgetPlan,
    Chosen,
    EarlyStoppingPlan,
    EvaluationPlan,
    HyperPlan,
    MeasurePlan,
    OptimizerPlan,
    PartitionPlan,
    ReplayPlan,
    Section,
)
from edge_server.plan.sites import SitesPlan
from edge_server.plan.sites import check as check_sites
from shared.data.spec import Client, Data, Dirichlet, Even, Partition, Shards
from shared.errors import ConfigError
from shared.protocol.topics import check_name

log = logging.getLogger(__name__)
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
        msgspec.structs.force_setattr(self, "algorithm", stopping.added_to(self.algorithm))
        if fallback and fallback.algorithm:
            instead = msgspec.structs.replace(fallback, algorithm=stopping.added_to(fallback.algorithm))
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
    before, after = (_leaves("", msgspec.to_builtins(one)) for one in (begun, plan))
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return [f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}" for key in keys]


def _leaves(place: str, value: Any) -> dict[str, Any]:
    """Return the values of a nest of tables and arrays by their places."""
    if isinstance(value, dict):
        parts = [(f"{place}.{key}".lstrip("."), one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{place}[{index}]", one) for index, one in enumerate(value)]
    else:
        return {place: value}
    return {key: leaf for name, one in parts for key, leaf in _leaves(name, one).items()}


def placed(plan: Plan, data_root: Path) -> Plan:
    """Return the plan with its paths of data and traces taken from `data_root`, or its fallback if nothing is there."""
    plan = msgspec.structs.replace(plan, device=rooted(plan.device, data_root))
    if plan.fallback and not (data_root / planned_data(plan).path).exists():
        away = data_root / planned_data(plan).path
        log.warning("%s is not there, training on %s instead", away, plan.fallback.data.source)
        plan = fallen_back(plan)
    own, theirs = _placed(plan.server_data, data_root), _placed(plan.data, data_root)
    return msgspec.structs.replace(plan, data=theirs, server_data=own, fallback=None)


def _placed(data: Data | msgspec.UnsetType, data_root: Path) -> Data | msgspec.UnsetType:
    return msgspec.structs.replace(data, path=str(data_root / data.path)) if data and data.path else data


def planned_data(plan: Plan) -> Data:
    """Return the data of a plan that has some, less the examples that the server keeps for its own training.

    Raises:
        ConfigError: It has none.
    """
    if not plan.data:
        raise ConfigError(
            f"plan {plan.name!r} has no [data], which agents on this machine, replay and the server's evaluation need: "
            "add it, or run the plan with connected devices"
        )
    own = plan.server_data
    if own and own.drawn and _is_same_set(own, plan.data):
        return msgspec.structs.replace(plan.data, without=own.drawn)
    return plan.data


def _is_same_set(one: Data, other: Data) -> bool:
    return (one.source, one.path, one.split, one.limit) == (other.source, other.path, other.split, other.limit)


def require_there(plan: Plan, data_root: Path) -> None:
    """Refuse a plan of which a data set is not there; its paths are placed.

    Raises:
        ConfigError: As said; the message names `data_root`.
    """
    for key, data in (("data", plan.data), ("server_data", plan.server_data)):
        if data and data.path and not Path(data.path).exists():
            raise ConfigError(
                f"{key}.path: {data.path} is not there; relative paths start at data_root, which is {data_root}: "
                f"correct {key}.path, --data-root or data_root of the server's file"
            )


def fallen_back(plan: Plan) -> Plan:
    """Return the plan with what its fallback names in place of its own."""
    chosen = plan.fallback and {name: one for name, one in msgspec.structs.asdict(plan.fallback).items() if one}
    return msgspec.structs.replace(plan, **(chosen or {}))


def check_structure(plan: Plan, path: Path) -> None:
    """Refuse names and counts that no single section of the plan in `path` can tell to be wrong; builds nothing.

    Raises:
        ConfigError: Names clash or are none, or a count cannot be.
    """
    check_name(plan.name, f"{path}: name")
    check_devices(plan.device, path)
    if plan.rounds < 1:
        raise ConfigError(f"{path}: rounds: {plan.rounds}; give at least 1")
    if plan.sites:
        names = [device.name for device in expanded(plan.device)]
        check_sites(plan.sites, names, plan.rounds, plan.cohort.min_devices, path)
    _check_labels(plan, path)
    if plan.emulation:
        check_emulation(plan.emulation, expanded(plan.device), path)
    if plan.local < 0:
        raise ConfigError(f"{path}: local: {plan.local}; give how many agents, or leave it out for the connected fleet")


def _check_labels(plan: Plan, path: Path) -> None:
    """Refuse examples of the server's own that it has no labels of, or that cannot be told from the devices'."""
    own, theirs = plan.server_data, plan.data
    if (own and own.without) or (theirs and theirs.without):
        raise ConfigError(f"{path}: data.without follows from [server_data] drawn: take it out")
    if own and own.labels:
        raise ConfigError(f"{path}: server_data.labels: the server trains on labels: take it out")
    if own and theirs and own.drawn and not _is_same_set(own, theirs) and own.path == theirs.path:
        wrong = next(name for name in ("source", "split", "limit") if getattr(own, name) != getattr(theirs, name))
        raise ConfigError(
            f"{path}: server_data.{wrong} must be that of data, so that what is drawn can be left out of the rest"
        )


def devices(plan: Plan, count: int = 0) -> list[DevicePlan]:
    """Return `count` devices: the plan's own, then made-up ones; 0 for just the plan's own.

    Raises:
        ConfigError: None are named and no count is given, or no round would begin with so few.
    """
    if not plan.device and not count:
        raise ConfigError(f"plan {plan.name!r} names no device; add [[device]] sections or give --local N")
    named = expanded(plan.device)[: count or None]
    found = [*named, *(DevicePlan(name=f"device-{index}") for index in range(len(named), count))]
    least = plan.cohort.min_devices
    if count < 0 or len(found) < least:
        raise ConfigError(
            f"{count or len(found)} devices: plan {plan.name!r} waits for cohort.min_devices = {least}; lower that"
        )
    return found


def share(plan: Plan, fleet: Sequence[DevicePlan], index: int) -> Data:
    """Return the data of the `index`-th device of a local fleet.

    Args:
        plan: Its partition deals the examples.
        fleet: All devices of the plan.
        index: Of the device in the fleet.
    """
    part, parts = plan.partition, len(fleet)
    place = {"parts": parts, "index": index, "seed": part.seed}
    match part.kind:
        case "none":
            return planned_data(plan)
        case "dirichlet":
            split: Partition = Dirichlet(alpha=part.alpha, min_examples=part.min_examples, **place)
        case "shards":
            split = Shards(shards_per_device=part.shards_per_device, **place)
        case "even":
            split = Even(**place)
        case "client":
            split = Client(client=fleet[index].name)
    return msgspec.structs.replace(planned_data(plan), partition=split)


def test_data(plan: Plan) -> Data:
    """Return the server's test set: the whole test split, with labels also where devices read none."""
    absent = dict.fromkeys(("labels", "drawn", "without"), msgspec.UNSET)
    data = planned_data(plan)
    return msgspec.structs.replace(data, split="test", partition=None, holdout=0.0, validation=0.0, **absent)
