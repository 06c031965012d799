"""Battery sensor: what a machine draws from its own battery, which is all of it, but only while no charger is there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from device_agent.hardware.files import read_text
from device_agent.probes.base import describe_absence, read_number
from device_agent.probes.power.rails import RailReader, Rails, multiply
from shared.errors import NoData

SUPPLIES = "sys/class/power_supply"
DISCHARGING = "Discharging"
MICRO = 1e-6


def open_sensor(root: Path) -> RailReader:
    """Return a reader of all batteries of the machine; raises NoData where there is none."""
    batteries = {supply.name: supply for supply in sorted((root / SUPPLIES).glob("*")) if _is_machine_battery(supply)}
    if not batteries:
        raise NoData(f"no battery of this machine below {root / SUPPLIES}")

    def ask(labels: Collection[str] | None) -> Rails:
        watts, lacks = {}, {}
        for name, supply in batteries.items():
            try:
                if read_text(supply / "status") == DISCHARGING:
                    watts[name] = _read_watts(supply)
            except NoData as error:
                lacks[name] = describe_absence(error)
        if not watts and not lacks:
            raise NoData("no battery is discharging: what the machine draws comes from its charger", lack="busy")
        return Rails(watts=watts, lacks=lacks, whole=(*watts, *lacks))

    return ask


def _is_machine_battery(supply: Path) -> bool:
    """Tell a battery of the machine from a charger, and from that of a mouse, whose scope is `Device`."""
    try:
        if read_text(supply / "type") != "Battery":
            return False
    except NoData:
        return False
    try:
        return read_text(supply / "scope") != "Device"
    except NoData:
        return True


def _read_watts(supply: Path) -> float:
    """Read watts; drivers differ in the sign, and the direction is known from the status."""
    try:
        return abs(multiply(read_number(supply / "power_now", MICRO)))
    except NoData as error:
        if error.lack != "not_present":
            raise
    return abs(multiply(read_number(supply / "current_now", MICRO), read_number(supply / "voltage_now", MICRO)))
