"""Plan the steps between settings of clocks and power mode: data, none where nothing differs; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from shared.errors import ConfigError

CPUFREQ_FOLDER = "sys/devices/system/cpu/cpufreq"
HERTZ_PER_KILOHERTZ = 1000


class PolicyClocks(msgspec.Struct, frozen=True, kw_only=True):
    """Governor and clock limits of one CPU frequency policy, and what it can be set to.

    Attributes:
        lowest_hertz: What the hardware can do, as are `highest_hertz` and the steps in `available_hertz`.
        governors: Those the kernel offers.
    """

    governor: str
    min_hertz: int
    max_hertz: int
    lowest_hertz: int
    highest_hertz: int
    available_hertz: tuple[int, ...] = ()
    governors: tuple[str, ...] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of a board that is set and put back.

    Attributes:
        policies: By the name of their folder: `policy0`.
        power_mode: Its name now; empty where the board has none.
        power_modes: Number by name of all there are.
        needs_reboot: Modes that are entered and left only by a restart.
    """

    policies: dict[str, PolicyClocks] = {}
    power_mode: str = ""
    power_modes: dict[str, int] = {}
    needs_reboot: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted settings of a board; empty and 0 leave things alone. As `[board.target]` of an agent's file."""

    power_mode: str = ""
    governor: str = ""
    max_hertz: float = 0.0


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a value to a file; `path` is below the board's root."""

    path: str
    value: str


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a board's own tool, after which the board must be in `power_mode`."""

    command: tuple[str, ...]
    power_mode: str


Step: TypeAlias = Write | Run


def plan_steps(current: Settings, target: Target) -> tuple[Step, ...]:
    """Plan the steps that bring a board to its target.

    Where the power mode changes, that is the only step: it sets clocks of its own, so plan again from what it leaves.

    Raises:
        ConfigError: The board cannot do that; says what it can.
    """
    return plan_between(current, resolve_target(current, target))


def plan_between(current: Settings, wanted: Settings) -> tuple[Step, ...]:
    """Plan the steps between two settings of a board, as `plan_steps`; policies that are gone are passed over."""
    if wanted.power_mode and wanted.power_mode != current.power_mode:
        number = _find_mode(current, wanted.power_mode)
        return (Run(command=("nvpmodel", "-m", str(number)), power_mode=wanted.power_mode),)
    return tuple(
        step
        for name, clocks in current.policies.items()
        if name in wanted.policies
        for step in _plan_writes(f"{CPUFREQ_FOLDER}/{name}", clocks, wanted.policies[name])
    )


def plan_restore(current: Settings, before: Settings, target: Target, *, mode: bool = True) -> tuple[Step, ...]:
    """Plan the steps that restore what a target set, and leave alone what it did not; raises as `plan_steps`.

    Args:
        before: Those from before the target was applied.
        mode: Whether to restore the power mode; else it stays, and only what it did to the clocks is restored.
    """
    policies = {
        name: msgspec.structs.replace(
            clocks if target.power_mode or target.max_hertz else current.policies[name],
            governor=clocks.governor if target.governor else current.policies[name].governor,
        )
        for name, clocks in before.policies.items()
        if name in current.policies
    }
    return plan_between(
        current, Settings(policies=policies, power_mode=before.power_mode if target.power_mode and mode else "")
    )


def resolve_target(current: Settings, target: Target) -> Settings:
    """Return the settings that a target leads to, rounded to what the board can do; raises as `plan_steps`."""
    if target.power_mode:
        _find_mode(current, target.power_mode)
    if (target.governor or target.max_hertz) and not current.policies:
        raise ConfigError("this board's kernel lets nobody set CPU clocks (no cpufreq policy); leave them out")
    policies = {name: _resolve_policy(name, clocks, target) for name, clocks in current.policies.items()}
    return msgspec.structs.replace(current, policies=policies, power_mode=target.power_mode or current.power_mode)


def _find_mode(current: Settings, mode: str) -> int:
    known = ", ".join(current.power_modes) or "none"
    if mode not in current.power_modes:
        raise ConfigError(f"power mode {mode!r} is not one of this board's: {known}")
    if current.power_mode not in current.power_modes:
        raise ConfigError(f"the power mode now is not known, so that {mode} could not be undone; set it by hand")
    if mode != current.power_mode and {mode, current.power_mode} & set(current.needs_reboot):
        number = current.power_modes[mode]
        raise ConfigError(
            f"power mode {mode} is reached from {current.power_mode} only by a restart, which is not ours to decide: "
            f"run `nvpmodel -m {number}` on a terminal and confirm it, or take another of: {known}"
        )
    return current.power_modes[mode]


def _resolve_policy(name: str, clocks: PolicyClocks, target: Target) -> PolicyClocks:
    governor = target.governor or clocks.governor
    if target.governor and clocks.governors and governor not in clocks.governors:
        raise ConfigError(f"governor {governor!r} is not one of {name}'s: {', '.join(clocks.governors)}")
    highest = _round_down(name, clocks, target.max_hertz) if target.max_hertz else clocks.max_hertz
    return msgspec.structs.replace(
        clocks, governor=governor, max_hertz=highest, min_hertz=min(clocks.min_hertz, highest)
    )


def _round_down(name: str, clocks: PolicyClocks, hertz: float) -> int:
    """Return the highest clock the policy can be capped at that is not above `hertz`."""
    if not hertz >= clocks.lowest_hertz:  # no figure at all, too
        lowest = f"{clocks.lowest_hertz / 1e6:g} MHz"
        raise ConfigError(f"{name} cannot be capped at {hertz / 1e6:g} MHz: its lowest clock is {lowest}")
    within = [one for one in clocks.available_hertz if clocks.lowest_hertz <= one <= hertz]
    return max(within, default=int(min(hertz, clocks.highest_hertz)))


def _plan_writes(folder: str, current: PolicyClocks, wanted: PolicyClocks) -> Iterator[Write]:
    if wanted.governor != current.governor:
        yield Write(path=f"{folder}/scaling_governor", value=wanted.governor)
    ends = {"scaling_max_freq": (current.max_hertz, wanted.max_hertz)}
    low = {"scaling_min_freq": (current.min_hertz, wanted.min_hertz)}
    # The kernel refuses or bends a highest clock below the lowest: whichever end makes room moves first.
    in_order: Mapping[str, tuple[int, int]] = low | ends if wanted.max_hertz < current.min_hertz else ends | low
    for name, (now, then) in in_order.items():
        if now != then:
            yield Write(path=f"{folder}/{name}", value=str(then // HERTZ_PER_KILOHERTZ))
