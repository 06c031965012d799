"""Compute and energy models from a board's firmware profile."""

from __future__ import annotations

from functools import cache

from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes.power.model import compute_watts
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import PowerModel, Profile
from edge_server.plan.simulated_devices import ProfileCompute, ProfilePower, Span
from edge_server.replay.devices.components import ComputeCost, ComputeModel, EnergyModel, steady_radio
from edge_server.replay.devices.ranges import Clock, count_cycles
from shared.errors import ConfigError


@cache
def load_profile(board: str) -> Profile:
    """Return a board's profile by its id or by the path of its TOML file.

    Raises:
        ConfigError: There is no such profile, or it is `auto`, which would depend on this machine.
    """
    if board == "auto":
        raise ConfigError("board: 'auto' would make a replay depend on this machine; name the board's profile")
    return load_for_board(LIVE_ROOT, board)


def max_clock(profile: Profile) -> float:
    """Return a profile's highest clock in hertz.

    Raises:
        ConfigError: The profile has no clock.
    """
    hertz = max((policy.max_hertz for policy in profile.cpu.policies), default=0.0) or profile.cpu.nominal_hertz
    if not hertz:
        raise ConfigError(f"profile {profile.id!r} has no clock; set compute.hertz")
    return hertz


def profile_compute(table: ProfileCompute, seed: int, device: str) -> ComputeModel:
    """Return the compute model of a device at its board's clock.

    Raises:
        ConfigError: There is no such profile, or it has no clock.
    """
    profile = load_profile(table.board)
    hertz: Span = max_clock(profile) if table.hertz is None else table.hertz
    clock = Clock(hertz, table.again, seed, device)
    return ComputeModel(
        takes=lambda work, t: clock.run(count_cycles(table, work), work.round, t, table.cores),
        source=f"profile {profile.id}",
        least=lambda work: clock.least(count_cycles(table, work), table.cores),
    )


def power_model(profile: Profile) -> PowerModel:
    """Return a board's power model.

    Raises:
        ConfigError: The profile has none.
    """
    if profile.power.model is None:
        raise ConfigError(f"profile {profile.id!r} has no power model; use another kind of power")
    return profile.power.model


def profile_power(table: ProfilePower) -> EnergyModel:
    """Return the energy model of a board: idle, with busy cores, and with the radio at full rate.

    Raises:
        ConfigError: There is no such profile, or it has no power model.
    """
    profile = load_profile(table.board)
    model = power_model(profile)

    def charge(busy: ComputeCost) -> float | None:
        if busy.hertz is None:
            return None
        return compute_watts(model, busy_cores=busy.cores, hertz=busy.hertz) * busy.seconds

    return EnergyModel(
        charge=charge,
        idle_w=model.idle_w,
        radio=steady_radio(
            compute_watts(model, busy_cores=0.0, hertz=model.max_hertz, sending=1.0) if model.tx_w else None,
            compute_watts(model, busy_cores=0.0, hertz=model.max_hertz, receiving=1.0) if model.rx_w else None,
        ),
        source=f"power model of profile {profile.id}",
    )
