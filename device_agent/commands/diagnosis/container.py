"""Hardware files hidden by a container, and the Compose settings that expose them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from device_agent.commands.diagnosis.checks import Check
from device_agent.hardware.files import read_text_or

NAME = "container"
MARKS = (".dockerenv", "run/.containerenv")
"""Files that Docker and podman create in each container."""
UNMASK = "`security_opt: [systempaths=unconfined]`"
FIRMWARE_DEVICE = "dev/vcio"
"""Mailbox of a Raspberry Pi, which vcgencmd needs for volts, clocks and throttling."""


def examine_container(root: Path) -> Iterator[Check]:
    """Yield what a container hides; nothing outside of a container."""
    if not any((root / mark).exists() for mark in MARKS):
        return
    hidden = list(_find_hidden(root))
    for what, remedy in hidden:
        yield Check(name=NAME, state="warn", finding=f"it hides {what}", remedy=f"give the container {remedy}")
    if not hidden:
        yield Check(name=NAME, state="ok", finding="it shows the board's firmware, sensors and energy counters")


def _find_hidden(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each hidden resource with the Compose setting that exposes it."""
    link = root / "proc/device-tree"
    if link.is_symlink() and not any((root / "sys/firmware/devicetree/base").glob("*")):
        yield "the device tree, which identifies the board (sys/firmware)", UNMASK
    counters = list((root / "sys/class/powercap").glob("intel-rapl:*"))
    if counters and not any((counter / "energy_uj").exists() for counter in counters):
        yield "the energy counters of the processor (sys/class/powercap)", UNMASK
    if not any((root / "sys/devices/system/cpu").glob("cpu[0-9]*")):
        yield "the processor's clocks (sys/devices/system/cpu)", "`volumes: [/sys:/sys:ro]`"
    is_raspberry = "Raspberry Pi" in read_text_or(root / "proc/device-tree/model")
    if is_raspberry and not (root / FIRMWARE_DEVICE).exists():
        yield "the firmware of the Raspberry Pi (vcgencmd)", "`devices: [/dev/vcio]` and `group_add: [video]`"
