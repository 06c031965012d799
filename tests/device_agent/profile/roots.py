"""Boards whose clocks and power mode can be set: files below a folder."""

from __future__ import annotations

from pathlib import Path

from device_agent.tuning.plan import CPUFREQ_FOLDER
from tests.trees import grow

KHZ = (600_000, 900_000, 1_200_000, 1_500_000)
GOVERNORS = "ondemand performance powersave"
CONF = "\n".join(f"< POWER_MODEL ID={number} NAME={name} >" for number, name in enumerate(("15W", "25W", "7W")))
JETSON = """
schema = 1
id = "jetson"
name = "Jetson"
[power_mode]
kind = "nvpmodel"
needs_reboot = ["7W"]
"""


def with_clocks(root: Path, *policies: str, least: int = KHZ[0], most: int = KHZ[-1]) -> Path:
    """Grow CPU frequency policies, all of them at `least` to `most` kHz."""
    for name in policies or ("policy0",):
        folder = f"{CPUFREQ_FOLDER}/{name}"
        files = {
            "scaling_governor": "ondemand",
            "scaling_available_governors": GOVERNORS,
            "scaling_available_frequencies": " ".join(map(str, KHZ)),
            "scaling_min_freq": least,
            "scaling_max_freq": most,
            "cpuinfo_min_freq": KHZ[0],
            "cpuinfo_max_freq": KHZ[-1],
        }
        grow(root, {f"{folder}/{file}": content for file, content in files.items()})
    return root


def with_modes(root: Path, number: int) -> Path:
    """Grow the power modes of a Jetson that is in one of them."""
    status = f"pmode:{number:04d} fmode:fan_mode_quiet"
    return grow(root, {"etc/nvpmodel.conf": CONF, "var/lib/nvpmodel/status": status})


def content(root: Path) -> dict[str, str]:
    """Return what all files below a folder hold."""
    return {str(path.relative_to(root)): path.read_text().strip() for path in root.rglob("*") if path.is_file()}


def clocks(root: Path, policy: str = "policy0") -> tuple[str, int, int]:
    """Return governor, least and most kHz of a policy."""
    folder = root / CPUFREQ_FOLDER / policy
    governor, least, most = (folder / f"scaling_{name}" for name in ("governor", "min_freq", "max_freq"))
    return governor.read_text().strip(), int(least.read_text()), int(most.read_text())
