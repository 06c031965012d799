"""Fuzz inputs: outputs of kernel, tools, firmware and meters, by parser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from random import Random

from device_agent.hardware import firmware
from device_agent.measurement.cpu_cycles import mean_hertz
from device_agent.probes import cpufreq, cputime, memory, network, power_mode, runtime
from device_agent.probes.clocks import parse_cpu_list
from device_agent.probes.power import http_meter, pmic, tegrastats
from shared.errors import NoData
from tests.fuzz.trees import cut_and_spliced

WORDS = (
    *("cpu", "cpu0", "eth0:", "lo:", "some avg10=", "0::/", "4:memory:/..", "MemTotal:", "kB", "processor :"),
    *("error=", "cpu MHz :", "frequency(48)=", "throttled=0x", "temp=", "'C", "pmode:", "RAM ", "CPU [", "%@", "mW"),
    *("-", ",", "\n", " ", "\0", "9" * 400, "-1", "1e999", "nan", "é", "1_0", "٣"),
)


@dataclass(frozen=True)
class Text:
    """A parser of a text, or of bytes, and what it takes."""

    parse: Callable[[str], object]
    good: str
    of_bytes: bool = False

    def seeds(self) -> list[bytes]:
        """Return what the parser takes."""
        return [self.good.encode()]

    def read(self, data: bytes) -> str:
        """Figures that are finite, or a named lack."""
        try:
            found = self.parse(data if self.of_bytes else data.decode(errors="replace"))  # type: ignore[arg-type]
        except NoData as error:
            return f"{error.lack}: {error}"
        figures = [one for one in _leaves(found) if isinstance(one, int | float)]
        assert all(math.isfinite(one) for one in figures)
        return "accepted: figures" if list(_leaves(found)) else "nothing"


def _leaves(found: object) -> list[object]:
    """Return what a value holds, however nested; an empty text is nothing."""
    if is_dataclass(found) and not isinstance(found, type):
        found = asdict(found)
    if isinstance(found, Mapping):
        return [leaf for one in found.values() for leaf in _leaves(one)]
    if isinstance(found, list | tuple | set):
        return [leaf for one in found for leaf in _leaves(one)]
    return [] if found in (None, "") else [found]


def mutate(data: bytes, random: Random) -> bytes:
    """Put words that such texts are made of into a text, or in its place."""
    if random.random() < 0.3:
        return cut_and_spliced(data, random)
    words = "".join(random.choice((*WORDS, str(random.randrange(10**12)))) for _ in range(random.randrange(1, 9)))
    place = random.randrange(len(data) + 1)
    return words.encode() if random.random() < 0.4 else data[:place] + words.encode() + data[place:]


TEXTS = {
    "cputime": Text(cputime.parse_stat, "cpu  10 0 5 100 1 0 0 0 0 0\ncpu0 10 0 5 100 1 0 0 0 0 0\n"),
    "network": Text(network.parse_dev, "Inter-|\n face |\n  eth0: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n"),
    "meminfo": Text(memory.parse_meminfo, "MemTotal: 1000 kB\nMemAvailable: 500 kB\n"),
    "pressure": Text(memory.parse_pressure, "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\n"),
    "cgroups": Text(lambda said: [str(one[0]) for one in memory.parse_cgroups(said)], "0::/user.slice\n"),
    "states": Text(lambda said: mean_hertz(cpufreq.parse_time_in_state(said) | {1e9: 1.0}), "600000 10\n900000 20\n"),
    "cpus": Text(parse_cpu_list, "0-3,5\n"),
    "clock": Text(firmware.parse_clock_hertz, "frequency(48)=700154304"),
    "bits": Text(firmware.parse_throttled_bits, "throttled=0x50005"),
    "celsius": Text(firmware.parse_celsius, "temp=43.8'C"),
    "answer": Text(partial(firmware.parse_answer, question="measure_clock arm"), "frequency(48)=700154304"),
    "mode number": Text(power_mode.parse_mode_number, "pmode:0002 fmode:fan_mode_quiet"),
    "mode names": Text(power_mode.parse_mode_names, "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n"),
    "mode query": Text(power_mode.parse_query, "NV Power Mode: 15W\n2\n"),
    "l4t": Text(runtime.parse_l4t, "# R36 (release), REVISION: 4.0, GCID: 1"),
    "pmic": Text(pmic.parse_rails, "VDD_CORE_A current(7)=1.50000000A\nVDD_CORE_V volt(15)=0.90000000V\n"),
    "tegrastats": Text(
        lambda said: tegrastats.parse_line(said).watts, "RAM 2/7 (lfb 1x4MB) CPU [1%@729] VDD_IN 4000mW/4000mW\n"
    ),
    "meter": Text(partial(http_meter.parse_watts, "shelly"), '{"id": 0, "apower": 4.5}', of_bytes=True),
}
