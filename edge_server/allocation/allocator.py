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
    """What more of a thing of its own would buy a device.

    Attributes:
        clock: The figure that a faster clock makes smaller.
        kept: (options, case, changed) -> the share of the model that each device would keep if its own figures alone
            were those of `changed`.
    """

    clock: str
    kept: Callable[[OptionsT, Case, Case], dict[str, float]]


@dataclass(frozen=True)
class Allocator(Generic[OptionsT]):
    """One way to decide.

    Attributes:
        options: Type of `options` in the plan's table.
        decides: Names of the values that it gives a device.
        decide: (options, solver, case) -> the decision; the coordinator adds name, limits and ladder. Nothing that a
            device says makes it fail.
        limits: (options, setting) -> what holds for all devices of a round, by name.
        figures: (options, device, limits) -> what is decided from, by name.
        spread: (options, setting, limits, figures of each device) -> the limits, where these depend on figures too.
        candidates: Options -> the shares of a model, or of its change, that there is a choice of; a case has the bytes
            of an update of each.
        objective: What it minimises, for people.
        shared: What one more of is worth the decision's multiplier, likewise.
        what_if: Of allocators whose values are shares of the model; None: an explanation says nothing of it.
        solvers: Those that it has.
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
    objective: str = "pruned of all devices together"
    shared: str = "of the whole uplink"
    what_if: WhatIf[OptionsT] | None = None
    solvers: tuple[Solver, ...] = ("numpy",)
