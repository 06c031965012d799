"""Allocator: interface of a plan's `[optimizer]`; `coordinator` has the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from edge_server.allocation.device_facts import DeviceFacts
from edge_server.allocation.inputs import Case, RoundSetting
from edge_server.allocation.optimizers.base import Solver
from edge_server.allocation.options import Options
from edge_server.journal.decision import Decision, Figure

OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True)
class WhatIf(Generic[OptionsT]):
    """Effect of a change in a device's own figures.

    Attributes:
        clock: Name of the figure, in seconds, that a faster clock lowers.
        keep_ratios: (options, case, changed) -> keep ratio of each device if only its own figures were those of
            `changed`.
    """

    clock: str
    keep_ratios: Callable[[OptionsT, Case, Case], dict[str, float]]


@dataclass(frozen=True)
class Allocator(Generic[OptionsT]):
    """Implementation of one optimizer name.

    Attributes:
        options: Type of `options` in the plan's table.
        decides: Names of the values that it assigns to a device.
        decide: (options, solver, case) -> the decision; the coordinator adds name, limits and ladder. Must not fail
            whatever devices report.
        limits: (options, setting) -> limits of the round for all devices, by name.
        figures: (options, device, limits) -> figures of a device, by name.
        spread: (options, setting, limits, figures by device) -> the limits, where these depend on figures too.
        candidates: Options -> selectable shares of a model or of its change; a case has the update bytes of each.
        objective: Minimised quantity, as shown to users.
        shared: Shared resource whose unit is worth the decision's multiplier, as shown to users.
        what_if: For allocators whose values are keep ratios; None: explanations omit single-device margins.
        solvers: Supported values of `solver`.
    """

    options: type[OptionsT]
    decides: tuple[str, ...]
    decide: Callable[[OptionsT, Solver, Case], Decision]
    limits: Callable[[OptionsT, RoundSetting], dict[str, float]] = lambda *_: {}
    figures: Callable[[OptionsT, DeviceFacts, Mapping[str, float]], dict[str, Figure]] = lambda *_: {}
    spread: Callable[
        [OptionsT, RoundSetting, Mapping[str, float], Mapping[str, Mapping[str, Figure]]], dict[str, float]
    ] = lambda _options, _setting, limits, _figures: dict(limits)
    candidates: Callable[[OptionsT], list[float]] = lambda _: []
    objective: str = "sum of the pruning ratios"
    shared: str = "uplink of this capacity"
    what_if: WhatIf[OptionsT] | None = None
    solvers: tuple[Solver, ...] = ("numpy",)
