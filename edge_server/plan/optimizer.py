"""The table `[optimizer]` of a plan: who decides what each device is given in a round, and within which limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from edge_server.plan.sections import Section
from shared.protocol.messages import Scalar

Name: TypeAlias = Literal["clusters", "keep_ratio", "bandwidth"]

DECIDES: Mapping[Name, str] = {"clusters": "keep", "keep_ratio": "keep", "bandwidth": "prune"}
"""What each optimizer decides of a device's training."""


class Options(Section, frozen=True, kw_only=True):
    """Base of the options of each optimizer."""

    def require(self, *, below: float = math.inf, **figures: float | None) -> None:
        """Refuse figures that are not above 0 and at most `below`; None is none."""
        for name, figure in figures.items():
            if figure is not None and not (0 < figure <= below and math.isfinite(figure)):
                most = "finite" if below == math.inf else f"<= {below:g}"
                raise ValueError(f"options.{name} must be > 0 and {most}")


class ClusterOptions(Options, frozen=True, kw_only=True):
    """Of `clusters`: the p_k of paper 001, dealt to the devices as they first appear.

    Attributes:
        keep: The ratios, one a cluster, with commas between.
    """

    keep: str = "0.2,0.4,0.6,0.8,1"

    def __post_init__(self) -> None:
        self.ratios()

    def ratios(self) -> list[float]:
        """Return the ratios. Raises ValueError."""
        return ratios(self.keep)


class MeasuringOptions(Options, frozen=True, kw_only=True):
    """What optimizers that decide from measurements have in common.

    Attributes:
        deadline_s: Seconds within which a task is to be done; T_th of paper 004. Absent: the deadline of `[round]`.
        smoothing: Weight of the last figure beside a new measurement; 0 takes each as it is.
        jump: By how much a measurement may differ from the last good one in one round; the rest waits for the next.
        stale_s: Age after which a reading is the last good one and no measurement.
        calibrated: Whether predictions are put right by the errors of earlier ones.
        up_bits_per_s, down_bits_per_s: Of a device of which nothing is known.
    """

    deadline_s: float | None = None
    smoothing: float = 0.0
    jump: float = 8.0
    stale_s: float = 3600.0
    calibrated: bool = True
    up_bits_per_s: float = 1e6
    down_bits_per_s: float = 1e7

    def __post_init__(self) -> None:
        self.require(deadline_s=self.deadline_s, stale_s=self.stale_s)
        self.require(up_bits_per_s=self.up_bits_per_s, down_bits_per_s=self.down_bits_per_s)
        if not 0 <= self.smoothing < 1 or not 1 < self.jump < math.inf:
            raise ValueError("options.smoothing must be in [0, 1), options.jump > 1 and finite")


class KeepOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Of `keep_ratio`: the largest p_k whose task meets the limits.

    Attributes:
        keep: The ratios to choose from.
        joules: Of one device's task; absent: its part of what is left of `[budget] joules`, or no limit.
        curve: How the work of a step depends on the ratio: `frozen`: (2 + p^2) / 3, since only weight gradients are
            saved; `smaller`: p^2, of a network that is physically smaller.
        steps: Training steps of a task, so that a step that was timed before round 1 tells of a task; 0: nobody knows.
        task_s: Seconds of a task of the whole model on a device of which nothing is known.
    """

    keep: str = "0.2,0.4,0.6,0.8,1"
    joules: float | None = None
    curve: Literal["frozen", "smaller"] = "frozen"
    steps: int = 0
    task_s: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratios(self.keep)
        self.require(joules=self.joules, task_s=self.task_s)
        if self.steps < 0:
            raise ValueError("options.steps must be >= 0")

    def ratios(self) -> list[float]:
        """Return the ratios in order of size."""
        return sorted(set(ratios(self.keep)))

    def work(self, keep: float) -> float:
        """Return the work of a step at a ratio, as a share of that of the whole model."""
        return (2 + keep**2) / 3 if self.curve == "frozen" else keep**2


class BandwidthOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Of `bandwidth`: pruning ratios and shares of the bandwidth of paper 004.

    Attributes:
        most_pruned: rho_max, which no device goes beyond where all can keep to it; 1 for no such floor.
        bits_per_weight: q of an upload.
        equal: The paper's baseline, every device with an equal share: `latency`: with the ratio that meets the
            deadline; `ratio`: with the ratio that it would have with its best share.
        compute: How the seconds of an iteration depend on its weights: `paper`: in proportion to those that it trains;
            `dense`: not at all, as it is where masks save bytes and no work.
        marks: Whether what goes up beside the weights counts: which they are (a bit of each, or 32 of each that is
            held), and biases, which are never pruned.
        margin: Share of the deadline that is left for what nobody counts.
        step_s: Seconds of a local iteration on a device of which nothing is known.
    """

    most_pruned: float = 0.95
    bits_per_weight: float = 32.0
    compute: Literal["paper", "dense"] = "paper"
    marks: bool = True
    margin: float = 0.0
    equal: Literal["", "latency", "ratio"] = ""
    step_s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bits_per_weight=self.bits_per_weight, step_s=self.step_s)
        self.require(below=1.0, most_pruned=self.most_pruned)
        if not 0 <= self.margin < 1:
            raise ValueError("options.margin must be in [0, 1)")

    def iterations(self, limits: Mapping[str, float], kept: float = 0.5) -> tuple[float, float, float]:
        """Return the iterations of the personal part, of the warm-up and of the global part, in whole networks.

        Who keeps all of the global part needs no warm-up, who keeps nothing of it takes no steps on it.
        """
        part = limits["weights_global"] / limits["weights"]
        personal, ours = limits["personal_steps"], limits["global_steps"] if kept > 0 else 0.0
        warm = limits["warmup_steps"] if 0 < kept < 1 else 0.0
        if self.compute == "dense":
            both = min(personal, ours) if limits.get("updates_at_once") else 0.0
            return personal + warm + ours - both, 0.0, 0.0
        return personal * (1 - part), warm * part, ours * part


AnyOptions: TypeAlias = ClusterOptions | KeepOptions | BandwidthOptions
OPTIONS: Mapping[Name, type[AnyOptions]] = {
    "clusters": ClusterOptions,
    "keep_ratio": KeepOptions,
    "bandwidth": BandwidthOptions,
}


class OptimizerPlan(Section, frozen=True, kw_only=True):
    """Who decides.

    Attributes:
        name: Of the optimizer.
        solver: `numpy`, or `cvxpy`, which is slower by far and there to compare.
        options: Of that optimizer.
    """

    name: Name
    solver: Literal["numpy", "cvxpy"] = "numpy"
    options: dict[str, Scalar] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse options that the optimizer does not have."""
        self.chosen()
        if self.solver == "cvxpy" and self.name != "bandwidth":
            raise ValueError(f"{self.name} has no solver but numpy; leave solver out")

    def chosen(self) -> AnyOptions:
        """Return the options in their own type. Raises ValueError."""
        try:
            return msgspec.convert(self.options, OPTIONS[self.name])
        except msgspec.ValidationError as error:
            problem, _, key = str(error).partition(" - at `$.")
            where = f"options.{key.strip('`')} of {self.name}" if key else f"options of {self.name}"
            raise ValueError(f"{where}: {problem}") from error


def unheeded(name: Name, algorithm: str, heeds: frozenset[str]) -> str:
    """Return what an optimizer decides that a method does not use, and the remedy; empty where it uses all.

    Args:
        name: Of the optimizer.
        algorithm: Of the method.
        heeds: What the method uses.
    """
    if DECIDES[name] in heeds:
        return ""
    others = " or ".join(one for one, decided in DECIDES.items() if decided in heeds)
    paced = "; uploads keep to their shares of the uplink all the same" if name == "bandwidth" else ""
    return (
        f"optimizer {name!r} decides {DECIDES[name]}, which algorithm {algorithm!r} does not use: devices train as "
        f"without it{paced}; {f'choose optimizer {others}, or ' if others else ''}take [optimizer] out"
    )


def ratios(text: str) -> list[float]:
    """Return the numbers of a text with commas between them.

    Raises:
        ValueError: One is none, or not in (0, 1].
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one <= 1 for one in found):
        raise ValueError('options.keep must be ratios in (0, 1] with commas between, such as "0.2,0.6,1"')
    return found
