"""Plan the steps between two settings of clocks and power mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from shared.errors import ConfigError

CPUFREQ_FOLDER = "sys/devices/system/cpu/cpufreq"
HERTZ_PER_KILOHERTZ = 1000


class PolicyClocks(msgspec.Struct, frozen=True, kw_only=True):
    """Governor and clock limits of a CPU frequency policy.

    Attributes:
        lowest_hertz: Hardware limit, as are `highest_hertz` and the steps in `available_hertz`.
    """

    governor: str
    min_hertz: int
    max_hertz: int
    lowest_hertz: int
    highest_hertz: int
    available_hertz: tuple[int, ...] = ()
    governors: tuple[str, ...] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Adjustable settings of a board.

    Attributes:
        policies: By folder name, such as `policy0`.
        power_mode: Name of the current mode; empty if the board has none.
        power_modes: Number of each mode by name.
        needs_reboot: Modes that are entered and left only by a reboot.
    """

    policies: dict[str, PolicyClocks] = {}
    power_mode: str = ""
    power_modes: dict[str, int] = {}
    needs_reboot: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Desired settings, as in `[board.target]` of an agent's configuration; empty and 0 leave a setting unchanged."""

    power_mode: str = ""
    governor: str = ""
    max_hertz: float = 0.0


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Step: write a value to a file, whose `path` is relative to the board's root."""

    path: str
    value: str


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Step: run a board's tool, after which the board must be in `power_mode`."""

    command: tuple[str, ...]
    power_mode: str


Step: TypeAlias = Write | Run


def plan_steps(current: Settings, target: Target) -> tuple[Step, ...]:
    """Plan the steps that bring a board to its target.

    A change of power mode is planned alone, since it sets clocks too: plan again from its result.

    Raises:
        ConfigError: The board does not support the target; the message says what it supports.
    """
    return plan_between(current, resolve_target(current, target))


def plan_between(current: Settings, desired: Settings) -> tuple[Step, ...]:
    """Plan the steps between two settings, see `plan_steps`; policies missing from either are ignored."""
    if desired.power_mode and desired.power_mode != current.power_mode:
        number = _find_mode(current, desired.power_mode)
        return (Run(command=("nvpmodel", "-m", str(number)), power_mode=desired.power_mode),)
    return tuple(
        step
        for name, clocks in current.policies.items()
        if name in desired.policies
        for step in _plan_writes(f"{CPUFREQ_FOLDER}/{name}", clocks, desired.policies[name])
    )


def plan_restore(current: Settings, before: Settings, target: Target, *, mode: bool = True) -> tuple[Step, ...]:
    """Plan the steps that restore what a target changed; raise as `plan_steps`.

    Args:
        before: Settings before the target was applied.
        mode: Whether to restore the power mode; otherwise only its effect on the clocks.
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
    """Return the settings that a target results in, rounded to what the board supports; raise as `plan_steps`."""
    if target.power_mode:
        _find_mode(current, target.power_mode)
    if (target.governor or target.max_hertz) and not current.policies:
        raise ConfigError("no cpufreq policy: this kernel cannot set CPU clocks; remove governor and max_hertz")
    policies = {name: _resolve_policy(name, clocks, target) for name, clocks in current.policies.items()}
    return msgspec.structs.replace(current, policies=policies, power_mode=target.power_mode or current.power_mode)


def _find_mode(current: Settings, mode: str) -> int:
    available = ", ".join(current.power_modes) or "none"
    if mode not in current.power_modes:
        raise ConfigError(f"unknown power mode {mode!r}; this board has: {available}")
    if current.power_mode not in current.power_modes:
        raise ConfigError(f"the current power mode is unknown, so {mode} could not be undone; set it by hand")
    if mode != current.power_mode and {mode, current.power_mode} & set(current.needs_reboot):
        number = current.power_modes[mode]
        raise ConfigError(
            f"power mode {mode} is reached from {current.power_mode} only by a reboot, which must be confirmed: "
            f"run `nvpmodel -m {number}` on a terminal, or choose another of: {available}"
        )
    return current.power_modes[mode]


def _resolve_policy(name: str, clocks: PolicyClocks, target: Target) -> PolicyClocks:
    governor = target.governor or clocks.governor
    if target.governor and clocks.governors and governor not in clocks.governors:
        raise ConfigError(f"unknown governor {governor!r}; {name} has: {', '.join(clocks.governors)}")
    highest = _round_down(name, clocks, target.max_hertz) if target.max_hertz else clocks.max_hertz
    return msgspec.structs.replace(
        clocks, governor=governor, max_hertz=highest, min_hertz=min(clocks.min_hertz, highest)
    )


def _round_down(name: str, clocks: PolicyClocks, hertz: float) -> int:
    """Return the highest supported clock cap that does not exceed `hertz`."""
    if not hertz >= clocks.lowest_hertz:  # also true for NaN
        lowest = f"{clocks.lowest_hertz / 1e6:g} MHz"
        raise ConfigError(f"{name} cannot be capped at {hertz / 1e6:g} MHz: its lowest clock is {lowest}")
    within = [step for step in clocks.available_hertz if clocks.lowest_hertz <= step <= hertz]
    return max(within, default=int(min(hertz, clocks.highest_hertz)))


def _plan_writes(folder: str, current: PolicyClocks, desired: PolicyClocks) -> Iterator[Write]:
    if desired.governor != current.governor:
        yield Write(path=f"{folder}/scaling_governor", value=desired.governor)
    ends = {"scaling_max_freq": (current.max_hertz, desired.max_hertz)}
    low = {"scaling_min_freq": (current.min_hertz, desired.min_hertz)}
    # The kernel rejects or alters a maximum below the minimum, so the end that makes room moves first.
    in_order: Mapping[str, tuple[int, int]] = low | ends if desired.max_hertz < current.min_hertz else ends | low
    for name, (now, then) in in_order.items():
        if now != then:
            yield Write(path=f"{folder}/{name}", value=str(then // HERTZ_PER_KILOHERTZ))
