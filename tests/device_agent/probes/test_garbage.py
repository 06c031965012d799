"""Whatever a kernel, a tool or a firmware says: the answer is a figure or a named lack, never another error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes import cpufreq, cputime, firmware, memory, network
from device_agent.probes import cpufreq as time_in_state
from device_agent.probes.clocks import CPUINFO, parse_cpu_list
from device_agent.profile.schema import Cpu, Profile
from shared.errors import NoData
from tests.trees import grow

WORDS = [
    "cpu",
    "cpu0",
    "eth0:",
    "lo:",
    "some avg10=",
    "0::/",
    "4:memory:/..",
    "MemTotal:",
    "kB",
    "processor :",
    "error=",
]
WORDS += [
    "cpu MHz :",
    "frequency(48)=",
    "throttled=0x",
    "temp=",
    "'C",
    "-",
    ",",
    "\n",
    " ",
    "\0",
    "9" * 400,
    "-1",
    "1e999",
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.integers(-9, 10**12).map(str) | st.text(max_size=9)).map("".join)

PARSERS = {
    "cputime": cputime.parse_stat,
    "network": network.parse_dev,
    "meminfo": memory.parse_meminfo,
    "pressure": memory.parse_pressure,
    "cgroups": lambda said: list(memory.parse_cgroups(said)),
    "states": lambda said: time_in_state.mean_hertz(time_in_state.parse_time_in_state(said) | {1e9: 1.0}),
    "cpus": parse_cpu_list,
    "clock": firmware.parse_clock_hertz,
    "bits": firmware.parse_throttled_bits,
    "celsius": firmware.parse_celsius,
    "answer": lambda said: firmware.parse_answer(said, "measure_clock arm"),
}


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
@given(said=TEXTS)
def test_a_parser_refuses_by_naming_a_lack(parse, said):
    with suppress(NoData):
        parse(said)


@given(said=TEXTS)
def test_the_probes_of_a_board_of_garbage(tmp_path_factory, said):
    """Every file the CPU's and the memory's probes read holds it."""
    folder = "sys/devices/system/cpu/cpufreq/policy0"
    names = [CPUINFO, "proc/meminfo", "proc/self/cgroup", "proc/pressure/memory", "tools/vcgencmd measure_clock arm"]
    names += [f"{folder}/{name}" for name in ("affected_cpus", "scaling_cur_freq", "scaling_max_freq")]
    root = grow(tmp_path_factory.mktemp("board"), {name: said.replace("\r", "") for name in names})
    profile = Profile(schema=1, id="x", name="x", cpu=Cpu(sources=("firmware", "cpufreq", "cpuinfo")))
    assert cpufreq.read(root, profile, 0.0).absent
    with suppress(NoData):
        memory.read(root, profile, 0.0)
