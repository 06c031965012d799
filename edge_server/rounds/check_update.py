"""Validate a received update: codec, tensors, norm and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from shared.algorithms.base import Result
from shared.codecs.base import Codec
from shared.errors import WireError
from shared.objectives.metric_sums import MOST_SUMS
from shared.protocol import payload
from shared.protocol.measurements import StepCost
from shared.protocol.messages import MISSED_STEPS, Assignment, Update
from shared.protocol.plausible import FIGURES
from shared.tensors.tree import Tree, check_like

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e12
MOST_METRICS, MOST_NAME = 256, 128


def read_update(content: memoryview, update: Update, codec: Codec) -> Result:
    """Decode a stored update; its tensors are views of the content.

    Args:
        codec: The codec of the task.

    Raises:
        WireError: The content is not of this codec.
    """
    coded = codec.decode(payload.unpack(content))
    return Result(coded.tree, update.weight, update.num_examples, update.loss, coded.coverage, update.metrics)


def check_stored_update(
    content: memoryview, codec: Codec, like: Tree, accepts: Callable[[Tree, Tree], None] | None = None
) -> float:
    """Refuse a stored update whose leaves differ from `like`, by its outline before decoding where possible.

    Args:
        codec: The codec of the task.
        like: The leaves that the task sent.
        accepts: The algorithm's own check, in place of `like`; called with the outline and then with the decoded tree.

    Returns:
        The norm of the update.

    Raises:
        WireError: Leaves or codec differ, or a value is not finite.
    """
    received = payload.unpack(content)
    outline = codec.outline(received)
    started = like
    if accepts:
        accepts(started, outline)
        like = outline
    check_like(outline, like)
    tree = codec.decode(received).tree
    norm = check_like(tree, like)
    if accepts:
        accepts(started, tree)
    return norm


def prune_updates(folder: Path, devices: Collection[str]) -> None:
    """Remove the stored updates of other devices, so that disk use grows with the cohort and not with the fleet.

    A device without a file takes over one of them: overwriting a file costs half of creating one.
    """
    paths = sorted(folder.glob("*"))
    stored = {path.name for path in paths}
    missing = [device for device in devices if device not in stored]
    for path in paths:
        if path.name.removeprefix(".") in devices:
            continue
        if missing and not path.name.startswith("."):
            path.replace(folder / missing.pop())
        else:
            path.unlink(missing_ok=True)


def check_update(update: Update, *, trains: bool) -> None:
    """Refuse an update that lacks what was requested, or has a figure that would spoil a mean.

    Raises:
        WireError: Parameters are missing or unrequested, or a figure is out of range.
    """
    if trains != (update.params is not None):
        fault = "no" if trains else "unrequested"
        raise WireError(f"the update carries {fault} parameters", reason="params")
    check_metrics(update.metrics)
    figures = [update.weight, update.loss or 0.0, *update.metrics.values()]
    if update.step:
        figures += _list_figures(update.step)
    if not all(math.isfinite(figure) for figure in figures) or update.num_examples < 0:
        raise WireError("a figure of the update is NaN or infinite", reason="not-finite")
    if update.step and min(_list_figures(update.step)) < 0:
        raise WireError("a figure of the training step is below zero", reason="step")
    most = min(MAX_WEIGHT, max(1.0, update.num_examples))
    if trains and not MIN_WEIGHT <= update.weight <= most:
        of = f", that of its {update.num_examples} examples" if most < MAX_WEIGHT else ""
        raise WireError(f"weight {update.weight} is not in {MIN_WEIGHT} to {most:g}{of}", reason="weight")


def require_trained(update: Update, assignment: Assignment) -> None:
    """Refuse the update of a split session whose steps all ran without the device: its part is unchanged.

    Raises:
        WireError: The device missed every step.
    """
    trains = assignment.is_split and not assignment.measures_statistics
    if trains and update.metrics.get(MISSED_STEPS, 0.0) >= assignment.steps:
        steps = f"all {assignment.steps} steps of the session ran without the device"
        raise WireError(f"{steps}; its part is unchanged and does not count", reason="missed-steps")


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Refuse metrics with too many or too long names, or with values out of range.

    Raises:
        WireError: A limit is exceeded.
    """
    if len(metrics) > MOST_METRICS or max(map(len, metrics), default=0) > MOST_NAME:
        raise WireError(
            f"{len(metrics)} metrics; at most {MOST_METRICS} are permitted, with names of {MOST_NAME} characters",
            reason="metrics",
        )
    for name in ("eval_accuracy", "eval_examples"):  # with these the server computes
        least, most = FIGURES[name]
        if not least <= (value := metrics.get(name, least)) <= most and math.isfinite(value):
            raise WireError(f"{name} {value} is not in {least:g} to {most:g}", reason="metrics")


def check_sums(sums: Mapping[str, Sequence[float]], names: Collection[str]) -> None:
    """Refuse sums of metrics that the run does not have, too many of them, and values that are not finite.

    Args:
        names: Of the run's metrics.

    Raises:
        WireError: A limit is exceeded.
    """
    if unknown := sorted(sums.keys() - set(names)):
        raise WireError(
            f"sums of {unknown[0][:MOST_NAME]!r}, which is not among the metrics of the run", reason="metrics"
        )
    for name, vector in sums.items():
        if not 0 < len(vector) <= MOST_SUMS:
            raise WireError(f"{name}: {len(vector)} sums, not 1 to {MOST_SUMS}", reason="metrics")
        if not all(map(math.isfinite, vector)):
            raise WireError(f"{name}: a sum is NaN or infinite", reason="not-finite")


def _list_figures(step: StepCost) -> list[float]:
    measured = [step.joules, step.idle_w, step.cycles, step.hertz]
    return [step.steps, step.seconds, step.weights, step.flops, *(figure or 0.0 for figure in measured)]
