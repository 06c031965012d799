"""PMIC of a Raspberry Pi 5: twelve rails, read by the firmware.

Devices fed directly from the 5 V input are not included.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from device_agent.hardware import firmware
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData
from shared.protocol.measurements import Absent

QUESTION = "pmic_read_adc"
RAIL_LINE = re.compile(
    r"^[ \t]*(\S{1,40})_([AV])[ \t]+(current|volt)\(\d{1,4}\)=(\d{1,3}(?:\.\d{1,12})?)([AV])[ \t\r]*$",
    re.ASCII | re.MULTILINE,
)
FALSE_ABOVE_A = {"3V3_DAC": 0.1, "3V3_ADC": 0.1}
"""Firmware of 2023 reports 0.61 A for a channel that carries microamperes."""
RAIL_NAMES = {"0V8_SYS": "0V8_SW"}
"""Rail name in the same firmware, and its current name."""


def open_sensor(root: Path) -> RailReader:
    """Open the sensor; a read asks the firmware for all rails at once and takes about 23 ms."""

    def ask(labels: Collection[str] | None) -> Rails:
        return parse_rails(firmware.ask(root, QUESTION))

    return ask


def parse_rails(answer: str) -> Rails:
    """Parse the rails that have both a current and a voltage; raises NoData if none has.

    Currents and voltages are paired by name, since the numbers in brackets do not match.
    """
    figures: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for name, suffix, _, figure, unit in RAIL_LINE.findall(answer):
        if suffix == unit:
            figures[unit][RAIL_NAMES.get(name, name)] = float(figure)
    amperes, volts = figures["A"], figures["V"]
    paired = [name for name in amperes if name in volts]
    if not paired:
        raise NoData(f"{QUESTION}: no rail with current and voltage in {answer[:60]!r}", lack="invalid")
    false = {name for name in paired if amperes[name] > FALSE_ABOVE_A.get(name, float("inf"))}
    return Rails(
        watts={name: amperes[name] * volts[name] for name in paired if name not in false},
        lacks={
            name: Absent(lack="invalid", cause=f"{amperes[name]:g} A is implausible: old firmware") for name in false
        },
        total_labels=tuple(name for name in paired if name not in false),
    )
