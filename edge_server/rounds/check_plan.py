"""Load a plan and validate it by building its algorithm, model, codecs and optimizer.

Reading a journal does not need this module, so listing runs loads no torch. It is separate from the plan's structs
because it imports the optimizers, which import those structs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from edge_server.allocation.coordinator import convert_options, unused_values
from edge_server.learner import blank_trained, load_pretrained, plan_algorithm
from edge_server.plan.check import check_structure
from edge_server.plan.data import apply_fallback, require_data, resolve_data
from edge_server.plan.plan import Plan
from edge_server.plan.project import open_project, project_data_root
from edge_server.plan.removed_keys import read_plan
from edge_server.sites.graph import graph_edges
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import BESIDE, Algorithm, evaluated_parameters
from shared.algorithms.early_stopping import can_stop_early
from shared.algorithms.personal_model import MODEL_SEED
from shared.codecs import CODECS
from shared.data.spec import NONE, require_source
from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.build import build_blank, require_fixed_constants
from shared.objectives.training import build_training_objective
from shared.registry import build
from shared.tensors.tree import State

log = logging.getLogger(__name__)

MOST_NAMED = 8
"""Most leaves named in an error message."""
UNEVALUATED = (
    "nothing evaluates the model: set evaluation.on_device or evaluation.devices_every for what devices hold out "
    "(data.holdout), or evaluation.every for the server's test data ([data])"
)


def load(
    path: Path, data_root: Path, *, several_sites: bool = False, is_resumed: Callable[[Plan], bool] = lambda _: False
) -> Plan:
    """Read and validate a plan; relative paths of data and traces are resolved against `data_root`.

    Args:
        several_sites: Accept plans with several sites.
        is_resumed: Returns whether a run that is not new has a plan; then removed keys are ignored.

    Raises:
        ConfigError: As `read_plan`, or names clash, or the plan has sites and may not.
    """
    plan = read_plan(path, lambda plan: is_resumed(resolve_data(plan, data_root)))
    if not several_sites:
        require_one_site(plan, path)
    return validate(plan, path, data_root)


def validate(plan: Plan, path: Path, data_root: Path) -> Plan:
    """Validate a plan and return it with its paths resolved against `data_root`.

    Args:
        path: Name of the plan, for errors.

    Raises:
        ConfigError: As `check`, or data that the server reads are missing.
    """
    open_project(plan, path)
    data_root = project_data_root(plan, path, data_root)
    check(plan, path)
    plan = resolve_data(plan, data_root)
    if plan.evaluation.every or plan.server_data:
        require_data(plan, data_root)
    try:
        load_pretrained(plan, build_blank(plan.model))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    uses = build(ALGORITHMS, plan.algorithm, "algorithm").resources.uses
    if plan.codec.name == "topk":
        uses |= {"sent"}  # top-k uses it with any algorithm
    if plan.optimizer and (unused := unused_values(plan.optimizer, plan.algorithm.name, uses)):
        log.warning("%s: %s", path, unused)
    if not (plan.evaluation.every or plan.evaluation.on_device or plan.evaluation.devices_every):
        log.warning("%s: %s", path, UNEVALUATED)
    return plan


def check(plan: Plan, path: Path) -> None:
    """Refuse a plan that no run could begin with, and the same for its fallback.

    Raises:
        ConfigError: As `check_structure`, or a name or option is unknown.
    """
    check_structure(plan, path)
    for variant in (plan, apply_fallback(plan)):
        _check_sources(variant, path)
        _check_choices(variant, path)


def require_one_site(plan: Plan, path: Path) -> None:
    """Refuse a multi-site plan where only one server runs.

    Raises:
        ConfigError: The plan has a `[sites]` table.
    """
    if plan.sites:
        raise ConfigError(
            f"{path}: sites: a plan for several edge servers is run by `edge-server run` at each of them, with a "
            "[[peer]] for every other, by `edge-server trial run PLAN` on this machine, or by `edge-server replay`: "
            "take the table out to run it with one server"
        )


def _check_sources(plan: Plan, path: Path) -> None:
    for data in (plan.data, plan.server_data):
        if data:
            require_source(data, str(path))


def _check_choices(plan: Plan, path: Path) -> None:
    """Validate names and options by building the plan's parts."""
    _check_early_stopping(plan, path)
    try:
        algorithm = _build_algorithm(plan)
        build(CODECS, plan.codec, "codec")
        build(CODECS, plan.cut_codec, "cut_codec")
        model = build_blank(plan.model)
        if plan.optimizer:
            convert_options(plan.optimizer)
        require_fixed_constants(plan.model)
        state = _begin(plan, algorithm, blank_trained(plan))
        _require_received(plan, state)
        if algorithm.check_hyper:
            algorithm.check_hyper(plan.hyper_of(1))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    _check_objective(plan, algorithm, path)
    _check_target_value(plan, path)
    _check_labels(plan, algorithm, path)
    if beside := [name for name in model.tree() if BESIDE in name]:
        raise ConfigError(
            f"{path}: model: the name {beside[0]!r} contains {BESIDE!r}, which marks what a method stores beside the "
            "network; rename that layer"
        )
    _check_step(plan, algorithm, path)
    _check_schedule(plan, path)
    _check_program(plan, algorithm, path)
    _check_topk(plan, algorithm, path)
    _check_exact(plan, {*model.tree(), *state.tree}, path)
    _check_device_evaluation(plan, algorithm, path)
    _check_sites(plan, algorithm, path)
    evaluated = evaluated_parameters(algorithm, model, state)
    if plan.evaluation.every and not {name for name, _ in model.layers.named_parameters()} <= evaluated.keys():
        raise ConfigError(
            f"{path}: algorithm {plan.algorithm.name!r} leaves a part of the model on the devices, and the server has "
            "none to evaluate: set evaluation.every to 0, and evaluation.on_device or evaluation.devices_every"
        )


def _check_labels(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse data without the labels that the algorithm trains on; a reconstruction needs none."""
    if (algorithm.server is None) != (not plan.server_data):
        problem = "needs labelled examples of the server's own: add" if algorithm.server else "uses none: take out"
        raise ConfigError(f"{path}: algorithm {plan.algorithm.name!r} {problem} [server_data]")
    if not plan.data or not plan.data.labels or plan.objective.kind == "anomaly":
        return
    if plan.data.holdout or plan.data.validation:
        raise ConfigError(
            f'{path}: data: examples with labels = "none" cannot be evaluated: set holdout and validation to 0'
        )
    if algorithm.reads_labels:
        raise ConfigError(
            f'{path}: data.labels: algorithm {plan.algorithm.name!r} trains on the labels of devices: take out "none"'
        )


def _check_objective(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse an unknown loss or metric, and a method that cannot train this kind of task."""
    try:
        objective = build_training_objective(plan.objective)
        _ = objective.loss_function
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if algorithm.kinds and objective.kind not in algorithm.kinds:
        able = sorted(
            name for name, builder in ALGORITHMS.items() if objective.kind in (builder().kinds or {objective.kind})
        )
        raise ConfigError(
            f"{path}: task.kind: algorithm {plan.algorithm.name!r} trains {' and '.join(sorted(algorithm.kinds))} "
            f"only, not {objective.kind!r}; choose one of {', '.join(able)}"
        )


def _build_algorithm(plan: Plan) -> Algorithm:
    """Build the plan's method.

    Raises:
        ConfigError: A name is unknown, or the method cannot train a part of the network.
    """
    algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
    if plan.adaptation and not algorithm.trains_parts:
        able = sorted(name for name, builder in ALGORITHMS.items() if builder().trains_parts)
        key = "lora" if plan.lora else "model.freeze"
        raise ConfigError(
            f"{key}: algorithm {plan.algorithm.name!r} decides itself which parameters its devices train and send; "
            f"choose one of {', '.join(able)}, or remove {key}"
        )
    return plan_algorithm(plan)


def _require_received(plan: Plan, state: State) -> None:
    """Refuse pretrained weights that devices would not get.

    Raises:
        ConfigError: Devices draw the initial model themselves.
    """
    if plan.model.weights and MODEL_SEED in state.facts:
        raise ConfigError(
            f"model.weights: devices of algorithm {plan.algorithm.name!r} draw their initial models from the run's "
            "seed and receive none; remove it, or choose another algorithm"
        )


def _begin(plan: Plan, algorithm: Algorithm, model: Model) -> State:
    """Return the method's initial state.

    Raises:
        ConfigError: The method cannot train the network, or not cut it there; the message names methods that can.
    """
    try:
        return algorithm.init(model, plan.seed)
    except ConfigError as error:
        if plan.model.name in MODELS:
            raise
        able = [name for name, builder in ALGORITHMS.items() if _can_begin(plan, builder(), model)]
        more = ", …" if len(able) > MOST_NAMED else ""
        raise ConfigError(
            f"algorithm {plan.algorithm.name!r}: {error}; methods that train this network: "
            f"{', '.join(able[:MOST_NAMED])}{more}"
        ) from error


def _can_begin(plan: Plan, algorithm: Algorithm, model: Model) -> bool:
    """Check whether a method with its default options can train a network."""
    if (algorithm.server is None) != (not plan.server_data) or algorithm.program:
        return False
    try:
        algorithm.init(model, plan.seed)
    except ConfigError:
        return False
    return True


def _check_step(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse options of the training step that the algorithm's own steps would ignore."""
    if missing := sorted(plan.hyper.step.features - algorithm.step_options):
        able = sorted(name for name, builder in ALGORITHMS.items() if missing[0] in builder().step_options)
        raise ConfigError(
            f"{path}: hyper.{missing[0]}: algorithm {plan.algorithm.name!r} trains by its own steps, which do not "
            f"support it; take it out, or choose one of {', '.join(able)}"
        )


def _check_schedule(plan: Plan, path: Path) -> None:
    """Refuse a schedule of the plan beside one of the algorithm: their factors would multiply."""
    builder = ALGORITHMS.get(plan.algorithm.name)
    option = inspect.signature(builder).parameters.get("schedule") if builder else None
    if plan.hyper.is_scheduled and option:
        schedule = plan.algorithm.options.get("schedule", option.default)
        if schedule != "constant":
            raise ConfigError(
                f"{path}: hyper.schedule: algorithm {plan.algorithm.name!r} has its own schedule {schedule!r}; set the "
                'option schedule = "constant", or take schedule and warmup_rounds out of [hyper]'
            )


def _check_target_value(plan: Plan, path: Path) -> None:
    """Refuse a target value that is never measured."""
    task = plan.task
    if task is msgspec.UNSET or task.target.value is msgspec.UNSET:
        return
    if plan.sites:
        raise ConfigError(f"{path}: task.target.value: sites end their runs together, after the last round; remove it")
    if not plan.evaluation.every:
        raise ConfigError(
            f"{path}: task.target.value ends a run by the server's tests, and evaluation.every = 0 turns these off; "
            "set evaluation.every, or remove the value"
        )


def _check_topk(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse top-k where payloads are not changes: values left out would decode to zero."""
    if plan.codec.name == "topk" and not algorithm.sends_changes:
        raise ConfigError(
            f"{path}: codec 'topk' sends the largest changes alone, and updates of algorithm "
            f"{plan.algorithm.name!r} are parameters themselves: choose another codec, such as float16"
        )
    if plan.cut_codec.name == "topk":
        raise ConfigError(
            f"{path}: cut_codec: 'topk' sends the largest changes of parameters, but features and gradients are "
            "no changes; choose another codec, such as float16"
        )


def _check_exact(plan: Plan, leaves: Collection[str], path: Path) -> None:
    """Refuse `codec.exact` names that are no leaf of the network; a typo would have no visible effect."""
    names = [name.strip() for name in str(plan.codec.options.get("exact", "")).split(",")]
    if unknown := [name for name in names if name and name not in leaves]:
        choices = ", ".join(sorted(leaves)[:MOST_NAMED]) + ", …" * (len(leaves) > MOST_NAMED)
        raise ConfigError(f"{path}: codec.exact: the network has no {unknown[0]!r}; known: {choices}")


def _check_device_evaluation(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse device evaluation without a whole model or without labels on the devices."""
    _check_runtime(plan, algorithm, path)
    name, evaluation = plan.algorithm.name, plan.evaluation
    if algorithm.split and (evaluation.on_device or plan.measure.seconds):
        raise ConfigError(
            f"{path}: algorithm {name!r} is split: devices of a round hold no whole model to evaluate or to measure; "
            "take out evaluation.on_device and measure.seconds, and set evaluation.devices_every to send it to them"
        )
    if evaluation.on_device and not algorithm.reads_labels:
        raise ConfigError(
            f"{path}: evaluation.on_device: algorithm {name!r} sends devices of a round what they train, and reads no "
            "label of theirs; set evaluation.devices_every to have them evaluate on the labels of what they hold back"
        )
    if evaluation.devices_every and plan.data and plan.data.labels and plan.objective.kind != "anomaly":
        raise ConfigError(
            f'{path}: evaluation.devices_every: data.labels is "none", and devices evaluate on labels; take out one'
        )


def _check_sites(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse sites whose algorithm mixes nothing, or whose graph is not connected."""
    if not plan.sites:
        return
    if algorithm.mixing is None:
        able = sorted(name for name, builder in ALGORITHMS.items() if builder().mixing)
        raise ConfigError(
            f"{path}: sites: algorithm {plan.algorithm.name!r} does not say what several servers mix; choose one of "
            f"{', '.join(able)}, or take [sites] out"
        )
    try:
        graph_edges(plan.sites)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_runtime(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse ONNX Runtime where only a trainer can assemble the model, or where devices evaluate nothing."""
    name, evaluation = plan.algorithm.name, plan.evaluation
    if evaluation.runtime != "onnx":
        return
    if algorithm.personal:
        raise ConfigError(
            f"{path}: evaluation.runtime: algorithm {name!r} gives devices models of their own, which only their "
            "trainers put together; take it out"
        )
    if not (evaluation.devices_every or evaluation.on_device):
        raise ConfigError(
            f"{path}: evaluation.runtime says what devices evaluate with, and they evaluate nothing: set "
            "evaluation.devices_every, or take it out"
        )


def _check_early_stopping(plan: Plan, path: Path) -> None:
    """Refuse early stopping for an algorithm whose devices do not compute their own loss."""
    able = sorted(name for name, builder in ALGORITHMS.items() if can_stop_early(builder))
    if "early_stopping" in plan.algorithm.options and plan.algorithm.name in ALGORITHMS.keys() - able:
        raise ConfigError(
            f"{path}: early_stopping: algorithm {plan.algorithm.name!r} cannot stop early; take it out, or choose "
            f"one of {', '.join(able)}"
        )


def _check_program(plan: Plan, algorithm: Algorithm, path: Path) -> None:
    """Refuse what needs examples where there are none, or where a user's program has them."""
    name, evaluation = plan.algorithm.name, plan.evaluation
    if plan.data and plan.data.source == NONE:
        if not algorithm.program:
            raise ConfigError(f'{path}: data.source: algorithm {name!r} trains on examples of [data]; replace "none"')
        if evaluation.every:
            raise ConfigError(
                f'{path}: evaluation.every: data.source is "none", so the server has no test data: set it to 0'
            )
    if algorithm.program and (plan.measure.seconds or evaluation.runtime == "onnx"):
        key = "measure.seconds" if plan.measure.seconds else "evaluation.runtime"
        raise ConfigError(
            f"{path}: {key}: algorithm {name!r} runs a program of yours, with its own examples; remove it"
        )
