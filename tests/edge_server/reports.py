"""Reports such as a board with a power sensor sends, from a seed."""

from __future__ import annotations

from random import Random

from shared.protocol.measurements import Absent, Cost, Reading, Spent
from shared.protocol.messages import Report

CONSTANT = {
    "cpu.policy0_max_hertz": 1.728e9,
    "cpu.policy4_max_hertz": 1.728e9,
    "cpu.online_count": 6.0,
    "memory.total_bytes": 7_990_247_424.0,
    "memory.limit_bytes": 4_294_967_296.0,
    "disk.total_bytes": 122_000_000_000.0,
    "throttle.now_flag": 0.0,
    "throttle.since_boot_flag": 1.0,
    "net.eth0_speed_bits_per_s": 1e9,
}
RAILS = ("total", "VDD_CPU_GPU_CV", "VDD_SOC")
ZONES = ("cpu-thermal", "gpu-thermal", "soc0-thermal", "tj-thermal", "hottest")


def report(random: Random, at: float, device: str = "orin", **changes: object) -> Report:
    """Return what a Jetson Orin Nano might say at a moment: 30 figures, of which 21 change."""
    figures: dict[str, float] = dict(CONSTANT)
    figures |= {f"power.{rail}_watts": random.randrange(3000, 15000) / 1000 for rail in RAILS}
    figures |= {f"thermal.{zone}_celsius": random.randrange(45000, 70000) / 1000 for zone in ZONES}
    figures |= {f"cpu.{name}_hertz": float(random.choice((729_600_000, 1_344_000_000))) for name in ("f", "policy0")}
    figures["memory.available_bytes"] = float(random.randrange(1 << 30, 1 << 32, 4096))
    figures["memory.pressure_ratio"] = random.randrange(100) / 10_000
    figures["disk.free_bytes"] = 5e10 - at * 1000
    figures["cputime.busy_seconds"], figures["cputime.total_seconds"] = at * 1.25, at * 6.0
    figures |= {f"net.eth0_{way}_bytes": at * 12_345.0 // 1 for way in ("received", "sent")}
    figures |= {f"link.{way}_bits_per_s": random.uniform(5e6, 2e7) for way in ("up", "down")}
    readings = {name: _reading(name, value, at) for name, value in figures.items()}
    spent = Spent(run="run-1", round=int(at // 600), cost=Cost(compute_s=4.5, compute_joules=31.25, upload_s=0.5))
    known = Report(
        device=device,
        at=at,
        board="nvidia-orin-nano-8gb",
        readings=readings,
        absent={"wifi": Absent(lack="not_present", cause="no wireless interface")},
        facts={"mode": "15W", "governor": "schedutil", "kernel": "5.15.148-tegra", "l4t": "36.4.3"},
        spent=spent,
        instance="0123456789abcdef0123456789abcdef",
    )
    return Report(**{**{name: getattr(known, name) for name in known.__struct_fields__}, **changes})


def _reading(name: str, value: float, at: float) -> Reading:
    group, _, rest = name.partition(".")
    is_power = group == "power"
    return Reading(
        value=value,
        unit=rest.rpartition("_")[2],
        source=f"{group} of sysfs",
        quality="corrected" if is_power else "measured",
        at=at - 3.0 if group == "link" else at,
        uncertainty=value * 0.03 if is_power else None,
    )
