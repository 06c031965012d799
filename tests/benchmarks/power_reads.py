"""CPU time of reading a board's power, per read and as a share of a core."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from measure import Figure

from device_agent.measurement.power_log import PowerLog
from device_agent.probes.power import source as power
from device_agent.probes.power.source import PowerSource, open_source
from device_agent.profile.load import load_for_board
from shared.errors import NoData
from shared.runtime.clock import monotonic

READS, SAMPLED_S = 500, 10.0
QUICK_READS, QUICK_SAMPLED_S = 20, 1.0
HWMON, RAPL, CPU = "sys/class/hwmon/hwmon1", "sys/class/powercap/intel-rapl", "sys/devices/system/cpu"
COMPUTING = {f"{CPU}/cpufreq/policy0/{name}": "1500000" for name in ("scaling_cur_freq", "scaling_max_freq")} | {
    "proc/stat": "cpu  4000 0 400 90000 0 0 0 0 0 0\n" + "".join(f"cpu{n} 1000 0 100 9 0 0 0 0\n" for n in range(4)),
    "proc/net/dev": "head\nhead\n"
    + "".join(f"{name}: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n" for name in ("eth0", "wlan0")),
    f"{CPU}/online": "0-3",
    f"{CPU}/cpufreq/policy0/affected_cpus": "0 1 2 3",
    f"{CPU}/cpufreq/policy0/scaling_governor": "ondemand",
    "tools/vcgencmd measure_clock arm": "frequency(48)=1500000000",
}


def _ina3221(*labels: str) -> dict[str, str]:
    files = {f"{HWMON}/name": "ina3221"}
    for number, label in enumerate(labels, 1):
        files |= {f"{HWMON}/in{number}_label": label, f"{HWMON}/in{number}_input": "5000"}
        files[f"{HWMON}/curr{number}_input"] = "1000"
    return files


def _zone(key: str, name: str) -> dict[str, str]:
    folder = f"{RAPL}:{key}"
    return {f"{folder}/name": name, f"{folder}/energy_uj": "5000000", f"{folder}/max_energy_range_uj": "262143328850"}


PMIC = "".join(
    f"{name}_A current(1)=0.50000000A\n{name}_V volt(2)=0.80000000V\n"
    for name in load_for_board(Path("/"), "raspberry-pi-5").power.total
)
BOARDS: Mapping[str, tuple[str, dict[str, str]]] = {
    "one rail of an INA3221": ("jetson-orin-nano", _ina3221("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC")),
    "three rails of an INA3221": ("jetson-agx-orin", _ina3221("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),
    "Pi 5's power chip": ("raspberry-pi-5", {"tools/vcgencmd pmic_read_adc": PMIC}),
    "RAPL, package and memory": ("generic-x86", _zone("0", "package-0") | _zone("0:0", "dram")),
    "an added INA219": ("raspberry-pi-4b", {f"{HWMON}/name": "ina219", f"{HWMON}/power1_input": "2700000"}),
    "the model": ("raspberry-pi-4b", COMPUTING),
}
"""Profile and files. Of a real chip the bus comes on top, on which the reader sleeps; files here answer at once."""


def run(*, quick: bool = False) -> list[Figure]:
    """Time the reads of each kind of board, then sample one at 5 Hz for a while."""
    figures, reads = [], QUICK_READS if quick else READS
    with tempfile.TemporaryDirectory() as folder:
        for name, (profile_id, files) in BOARDS.items():
            root = _grow(Path(folder) / name, files)
            profile = load_for_board(root, profile_id)
            source = open_source(root, profile, monotonic)
            read_s = _cpu_s(source, reads)
            figures.append(Figure(f"read {name}", read_s * 1e6, "µs"))
            figures.append(Figure("  at its own rate", 100 * read_s / source.period_s, "% of a core", "<= 1"))
            began = time.thread_time()
            for _ in range(reads):
                power.read(root, profile, 0.0)
            figures.append(Figure("  found and all rails", (time.thread_time() - began) / reads * 1e6, "µs"))
        root = Path(folder) / "three rails of an INA3221"
        figures.append(
            _sampled(
                open_source(root, load_for_board(root, "jetson-agx-orin"), monotonic),
                QUICK_SAMPLED_S if quick else SAMPLED_S,
            )
        )
    return figures


def _grow(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def _cpu_s(source: PowerSource, reads: int) -> float:
    """Return the mean CPU seconds of a read; those of counters too soon after another are reads as well."""
    began = time.thread_time()
    for _ in range(reads):
        with contextlib.suppress(NoData):
            source.read()
    return (time.thread_time() - began) / reads


def _sampled(source: PowerSource, seconds: float) -> Figure:
    """Return what the whole process takes while it samples three rails at 5 Hz and does nothing else."""
    with PowerLog(source, period_s=0.2) as log, log.busy():
        began = time.process_time()
        threading.Event().wait(seconds)
        spent = time.process_time() - began
    return Figure("sampling at 5 Hz, the thread and all", 100 * spent / seconds, "% of a core", "<= 1")
