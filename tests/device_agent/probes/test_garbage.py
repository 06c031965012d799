"""Whatever a kernel says: the probes answer with a figure or a named lack; each parser is in `test_damaged_inputs`."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes import cpufreq, memory
from device_agent.probes.clocks import CPUINFO
from device_agent.profile.schema import Cpu, Profile
from shared.errors import NoData
from tests.fuzz.texts import WORDS
from tests.machine import grow

TEXTS = st.lists(st.sampled_from(WORDS) | st.integers(-9, 10**12).map(str) | st.text(max_size=9)).map("".join)


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
