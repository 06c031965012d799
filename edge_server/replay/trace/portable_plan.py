"""Portable plan: data paths relative to the folder of data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan


def make_portable(plan: Plan, data_root: Path) -> Plan:
    """Return a plan with paths below `data_root` made relative to it; `plan.placed` is the inverse."""
    devices = [_make_device_portable(device, data_root) for device in plan.device]
    server_data = _relative(plan.server_data, data_root)
    return msgspec.structs.replace(plan, data=_relative(plan.data, data_root), server_data=server_data, device=devices)


def _make_device_portable(device: DevicePlan, data_root: Path) -> DevicePlan:
    link, power = _relative(device.link, data_root), _relative(device.power, data_root)
    return msgspec.structs.replace(device, link=link, power=power)


def _relative(section: Any, data_root: Path) -> Any:
    path = getattr(section, "path", "")
    if not path or not Path(path).is_relative_to(data_root):
        return section
    return msgspec.structs.replace(section, path=Path(path).relative_to(data_root).as_posix())
