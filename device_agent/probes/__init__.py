"""Registry of probes by name: one file each, one function each."""

from collections.abc import Mapping

from device_agent.probes import (
    cpufreq,
    cputime,
    disk,
    gpu,
    memory,
    network,
    power_mode,
    runtime,
    thermal,
    throttle,
    wifi,
)
from device_agent.probes.base import Probe
from device_agent.probes.power import source

PROBES: Mapping[str, Probe] = {
    "cpu": cpufreq.read,
    "cputime": cputime.read,
    "power": source.read,
    "gpu": gpu.read,
    "thermal": thermal.read,
    "throttle": throttle.read,
    "mode": power_mode.read,
    "memory": memory.read,
    "disk": disk.read,
    "net": network.read,
    "wifi": wifi.read,
    "runtime": runtime.read,
}
