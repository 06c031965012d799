"""CPU seconds out of /proc/stat: what counts as busy, what as neither, and counters that go back."""

from __future__ import annotations

import time

import psutil
import pytest

from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes import cputime
from device_agent.profile.schema import Profile
from shared.errors import NoData
from tests.machine import grow

PROFILE = Profile(schema=1, id="test", name="test")
STAT = """cpu  400 10 60 5000 30 5 25 40 100 0
cpu0 100 10 30 2500 10 5 15 20 50 0
cpu3 300 0 30 2500 20 0 10 20 50 0
intr 12 0 1
ctxt 9
btime 1
"""


def test_busy_is_all_but_idle_and_what_the_host_took(tmp_path):
    """Busy: 400 + 10 + 60 + 5 + 25 = 500 ticks; with 5000 idle and 30 waiting, 5530; guests are in user already."""
    cpus = cputime.parse_stat(STAT, ticks_per_s=100)
    assert cpus["cpu"] == cputime.CpuSeconds(busy=5.0, total=55.3)
    assert cpus.keys() == {"cpu", "cpu0", "cpu3"}


def test_the_probe_gives_both_of_all_cpus(tmp_path):
    found = cputime.read(grow(tmp_path, {"proc/stat": STAT}), PROFILE, 3.0)
    assert {name: one.value * cputime.TICKS_PER_S for name, one in found.readings.items()} == pytest.approx(
        {"cputime.busy_seconds": 500, "cputime.total_seconds": 5530}
    )


@pytest.mark.parametrize(
    "stat", ["", "cpu", "cpu x y z a b", "cpu -1 0 0 0 0 0 0 0", f"cpu {'9' * 5000} 0 0 0 0", "cpu0 1 1 1 1 1"]
)
def test_without_a_line_of_all_cpus_it_is_invalid(tmp_path, stat):
    with pytest.raises(NoData) as caught:
        cputime.read(grow(tmp_path, {"proc/stat": stat}), PROFILE, 0.0)
    assert caught.value.lack == "invalid"


def test_old_kernels_have_fewer_fields():
    """Without irq, softirq and steal."""
    assert cputime.parse_stat("cpu 100 0 100 700 100", ticks_per_s=100)["cpu"] == cputime.CpuSeconds(
        busy=2.0, total=10.0
    )


def test_this_machine_agrees_with_psutil():
    """Read one after the other: within what all CPUs can do in between."""
    mine = cputime.read(LIVE_ROOT, PROFILE, 0.0).readings["cputime.busy_seconds"].value
    theirs = psutil.cpu_times()
    busy = theirs.user + theirs.nice + theirs.system + theirs.irq + theirs.softirq
    assert mine == pytest.approx(busy, abs=2.0 * psutil.cpu_count())


def test_computing_shows():
    """0.2 s of one CPU are busy seconds; others may add theirs."""
    before = cputime.parse_stat((LIVE_ROOT / "proc/stat").read_text())["cpu"]
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    after = cputime.parse_stat((LIVE_ROOT / "proc/stat").read_text())["cpu"]
    assert after.busy - before.busy >= 0.15
    assert after.total - before.total >= 0.15
