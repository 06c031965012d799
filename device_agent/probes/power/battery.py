"""Battery sensor: total power of a machine while it runs on battery."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from device_agent.hardware.files import list_folder, read_text
from device_agent.probes.base import describe_absence, read_number, read_within
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData
from shared.protocol.plausible import AMPERES, VOLTS

SUPPLIES = "sys/class/power_supply"
DISCHARGING = "Discharging"
RESTING = frozenset({"Charging", "Not charging", "Full", "Unknown"})
SUPPLY_TYPES = frozenset(
    {"Battery", "UPS", "Mains", "USB", "USB_DCP", "USB_CDP", "USB_ACA", "USB_C", "USB_PD", "USB_PD_DRP", "BrickID"}
    | {"Wireless", "Unknown"}
)
"""All types of the kernel's class (include/linux/power_supply.h); an unknown one might be a battery."""
MICRO = 1e-6


def open_sensor(root: Path) -> RailReader:
    """Open all batteries of the machine; raises NoData if there is none, or a supply cannot be identified."""
    batteries = {supply.name: supply for supply in list_folder(root / SUPPLIES) if _is_machine_battery(supply)}
    if not batteries:
        raise NoData(f"no battery of this machine below {root / SUPPLIES}")

    def ask(labels: Collection[str] | None) -> Rails:
        watts, lacks = {}, {}
        for name, supply in batteries.items():
            try:
                if _is_discharging(supply):
                    watts[name] = _read_watts(supply)
            except NoData as error:
                lacks[name] = describe_absence(error)
        if not watts and not lacks:
            raise NoData("no battery is discharging: the machine runs on its charger", lack="busy")
        return Rails(watts=watts, lacks=lacks, total_labels=(*watts, *lacks))

    return ask


def _is_machine_battery(supply: Path) -> bool:
    """Distinguish a battery of the machine from a charger, and from a mouse's battery (scope `Device`).

    Raises:
        NoData: The supply cannot be identified; without one of its batteries, a machine's total is unknown.
    """
    try:
        kind = read_text(supply / "type")
    except NoData as error:
        if error.lack == "not_present":
            return False
        raise
    if kind not in SUPPLY_TYPES:
        raise NoData(f"{supply}/type: {kind[:40]!r} is not a known supply type", lack="invalid")
    if kind != "Battery":
        return False
    try:
        return read_text(supply / "scope") != "Device"
    except NoData as error:
        if error.lack == "not_present":
            return True
        raise


def _is_discharging(supply: Path) -> bool:
    """Check that a battery discharges; raises NoData for an unknown status."""
    status = read_text(supply / "status")
    if status != DISCHARGING and status not in RESTING:
        raise NoData(f"{supply}/status: {status[:40]!r} is not a known status", lack="invalid")
    return status == DISCHARGING


def _read_watts(supply: Path) -> float:
    """Read watts without sign: drivers differ in it, and the direction is known from the status."""
    try:
        return abs(read_number(supply / "power_now", MICRO))
    except NoData as error:
        if error.lack != "not_present":
            raise
    amperes = read_within(supply / "current_now", AMPERES, MICRO)
    return abs(amperes) * read_within(supply / "voltage_now", VOLTS, MICRO)
