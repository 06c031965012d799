"""Read what a board is set to: governor and limits of every CPU frequency policy, and the power mode by name."""

from __future__ import annotations

from pathlib import Path

from device_agent.hardware.files import text
from device_agent.probes.base import number
from device_agent.probes.clocks import policies
from device_agent.probes.power_mode import mode, mode_names
from device_agent.profile.schema import PowerMode, Profile
from device_agent.tuning.plan import HERTZ_PER_KILOHERTZ, Clocks, Settings
from shared.errors import NoData


def settings(root: Path, profile: Profile) -> Settings:
    """Return the settings of the board below `root`, without policies that do not answer."""
    found = {folder.name: clocks for folder in policies(root) if (clocks := _clocks(folder)) is not None}
    told = profile.power_mode
    if told.kind == "none":
        return Settings(policies=found)
    return Settings(
        policies=found,
        power_mode=power_mode(root, told),
        power_modes=_modes(root, told),
        needs_reboot=told.needs_reboot,
    )


def power_mode(root: Path, told: PowerMode) -> str:
    """Return the power mode now, empty where nobody knows."""
    try:
        return mode(root, told)
    except NoData:
        return ""


def _clocks(policy: Path) -> Clocks | None:
    try:
        return Clocks(
            governor=text(policy / "scaling_governor"),
            min_hertz=_hertz(policy / "scaling_min_freq"),
            max_hertz=_hertz(policy / "scaling_max_freq"),
            lowest_hertz=_hertz(policy / "cpuinfo_min_freq"),
            highest_hertz=_hertz(policy / "cpuinfo_max_freq"),
            available_hertz=tuple(
                int(word) * HERTZ_PER_KILOHERTZ
                for word in _words(policy / "scaling_available_frequencies")
                if word.isdigit()
            ),
            governors=_words(policy / "scaling_available_governors"),
        )
    except NoData:
        return None  # its CPUs are off


def _hertz(path: Path) -> int:
    return int(number(path, HERTZ_PER_KILOHERTZ))


def _words(path: Path) -> tuple[str, ...]:
    """Return a list the kernel may not offer; intel_pstate has no steps."""
    try:
        return tuple(text(path).split())
    except NoData:
        return ()


def _modes(root: Path, told: PowerMode) -> dict[str, int]:
    try:
        return {name: number_ for number_, name in mode_names(text(root / told.conf)).items()}
    except NoData:
        return {}
