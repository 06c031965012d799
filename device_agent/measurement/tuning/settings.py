"""Read a board's settings: CPU frequency policies and power mode."""

from __future__ import annotations

from pathlib import Path

from device_agent.hardware.files import read_text, read_text_or
from device_agent.measurement.tuning.plan import HERTZ_PER_KILOHERTZ, PolicyClocks, Settings
from device_agent.probes.base import WHOLE_NUMBER, read_number
from device_agent.probes.clocks import find_policies
from device_agent.probes.power_mode import parse_mode_names, read_mode
from device_agent.profile.schema import PowerMode, Profile
from shared.errors import NoData


def read_settings(root: Path, profile: Profile) -> Settings:
    """Read the settings of the board below `root`; policies that are offline are left out."""
    try:
        folders = find_policies(root)
    except NoData:
        folders = []
    policies = {folder.name: clocks for folder in folders if (clocks := _read_policy(folder)) is not None}
    table = profile.power_mode
    if table.kind == "none":
        return Settings(policies=policies)
    return Settings(
        policies=policies,
        power_mode=read_power_mode(root, table),
        power_modes=_read_modes(root, table),
        needs_reboot=table.needs_reboot,
    )


def read_power_mode(root: Path, table: PowerMode) -> str:
    """Return the name of the power mode; empty if unknown."""
    try:
        return read_mode(root, table)
    except NoData:
        return ""


def _read_policy(policy: Path) -> PolicyClocks | None:
    try:
        return PolicyClocks(
            governor=read_text(policy / "scaling_governor"),
            min_hertz=_read_hertz(policy / "scaling_min_freq"),
            max_hertz=_read_hertz(policy / "scaling_max_freq"),
            lowest_hertz=_read_hertz(policy / "cpuinfo_min_freq"),
            highest_hertz=_read_hertz(policy / "cpuinfo_max_freq"),
            available_hertz=tuple(
                int(frequency) * HERTZ_PER_KILOHERTZ
                for frequency in _read_list(policy / "scaling_available_frequencies")
                if WHOLE_NUMBER.fullmatch(frequency)
            ),
            governors=_read_list(policy / "scaling_available_governors"),
        )
    except NoData:
        return None  # its CPUs are offline


def _read_hertz(path: Path) -> int:
    return int(read_number(path, HERTZ_PER_KILOHERTZ))


def _read_list(path: Path) -> tuple[str, ...]:
    """Return a list file's entries; empty if the kernel does not offer it, such as the steps of intel_pstate."""
    return tuple(read_text_or(path).split())


def _read_modes(root: Path, table: PowerMode) -> dict[str, int]:
    try:
        return {name: number_ for number_, name in parse_mode_names(read_text(root / table.conf)).items()}
    except NoData:
        return {}
