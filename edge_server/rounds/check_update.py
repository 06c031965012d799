"""What a server makes of one update: a word that settles it, its parameters, a check of its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from shared.algorithms.base import Result
from shared.codecs.base import Codec
from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.measurements import StepCost
from shared.protocol.messages import MISSED_STEPS, Assignment, Update
from shared.tensors.tree import Tree, check_like
from shared.transfer import to_file

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e12
MOST_METRICS, MOST_NAME = 256, 128
RANGES = {"eval_accuracy": (0.0, 1.0), "eval_examples": (0.0, MAX_WEIGHT)}
"""Metrics that the server itself reckons with."""


def read(path: Path, update: Update, codec: Codec) -> Result:
    """Read a stored update; its tensors are views of the file.

    Args:
        codec: That was asked for.

    Raises:
        WireError: It is not of the codec that was asked for.
    """
    coded = codec.decode(payload.unpack(to_file.view(path)))
    return Result(coded.tree, update.weight, update.num_examples, update.loss, coded.coverage, update.metrics)


def require_like(path: Path, codec: Codec, like: Tree, accepts: Callable[[Tree, Tree], None] | None = None) -> float:
    """Refuse a stored update that is not made of leaves of `like`, before it is decoded where its outline tells.

    Where a method has a rule of its own, `accepts`, that is asked in place of this one: of the outline, then of what
    came.

    Args:
        codec: That was asked for.
        like: Leaves that it must be made of.
        accepts: The method's own rule, in place of `like`.

    Returns:
        Its norm.

    Raises:
        WireError: It is not, or not of the codec that was asked for, or holds a number that is none.
    """
    received = payload.unpack(to_file.view(path))
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


def keep_only(folder: Path, devices: Collection[str]) -> None:
    """Part with the stored updates of other devices, so that what is kept grows with the cohort, not with the fleet.

    A device that has no file yet gets one of theirs: overwriting costs half of making one.
    """
    paths = sorted(folder.glob("*"))
    here = {path.name for path in paths}
    missing = [device for device in devices if device not in here]
    for path in paths:
        if path.name.removeprefix(".") in devices:
            continue
        if missing and not path.name.startswith("."):
            path.replace(folder / missing.pop())
        else:
            path.unlink(missing_ok=True)


def check(update: Update, *, trains: bool) -> None:
    """Refuse an update without what was asked for, or with a figure that would spoil a mean.

    Raises:
        WireError: It is such a one.
    """
    if trains != (update.params is not None):
        raise WireError(
            "the update carries no parameters" if trains else "parameters nobody asked for", reason="params"
        )
    check_metrics(update.metrics)
    figures = [update.weight, update.loss or 0.0, *update.metrics.values()]
    if update.step:
        figures += _figures(update.step)
    if not all(math.isfinite(figure) for figure in figures) or update.num_examples < 0:
        raise WireError("a figure of the update is NaN or infinite", reason="not-finite")
    if update.step and min(_figures(update.step)) < 0:
        raise WireError("a figure of the training step is below zero", reason="step")
    most = min(MAX_WEIGHT, max(1.0, update.num_examples))
    if trains and not MIN_WEIGHT <= update.weight <= most:
        of = f", that of its {update.num_examples} examples" if most < MAX_WEIGHT else ""
        raise WireError(f"weight {update.weight} is not in {MIN_WEIGHT} to {most:g}{of}", reason="weight")


def require_trained(update: Update, told: Assignment) -> None:
    """Refuse the update of a split session that went on without its device: that part is as it came down.

    In a mean it would weigh as one that has trained.

    Raises:
        WireError: It is of such a session.
    """
    trains = told.is_split and not told.measures_statistics
    if trains and update.metrics.get(MISSED_STEPS, 0.0) >= told.steps:
        raise WireError(
            f"all {told.steps} steps of its session went on without it: its part is as it was and does not count",
            reason="missed-steps",
        )


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Refuse metrics that no device measures, so that no mean and no page of the run has to bear them.

    Raises:
        WireError: They are such.
    """
    if len(metrics) > MOST_METRICS or max(map(len, metrics), default=0) > MOST_NAME:
        raise WireError(
            f"{len(metrics)} metrics; tell {MOST_METRICS} at most, by names of {MOST_NAME} characters", reason="metrics"
        )
    for name, (least, most) in RANGES.items():
        if not least <= (value := metrics.get(name, least)) <= most and math.isfinite(value):
            raise WireError(f"{name} {value} is not in {least:g} to {most:g}", reason="metrics")


def _figures(step: StepCost) -> list[float]:
    measured = [step.joules, step.idle_w, step.cycles, step.hertz]
    return [step.steps, step.seconds, step.weights, step.flops, *(figure or 0.0 for figure in measured)]
