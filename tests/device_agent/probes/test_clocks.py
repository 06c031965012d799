"""CPU clocks: whose word counts, what is passed over and said, and what no CPU can run by."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.probes import clocks, cpufreq
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Cpu, Profile
from shared.errors import NoData
from tests.machine import as_nobody, busy, grow, open_to_all, shared

POLICIES = "sys/devices/system/cpu/cpufreq"
PI = Cpu(sources=("firmware", "cpufreq"))
VCGENCMD = "tools/vcgencmd measure_clock arm"


def profile(**cpu: object) -> Profile:
    return Profile(schema=1, id="test", name="test", cpu=Cpu(**cpu))


def policy(first: int, khz: object, cpus: str = "", **files: object) -> dict[str, object]:
    """Return the files of a policy."""
    names = {"affected_cpus": cpus or str(first), "scaling_cur_freq": khz, "scaling_governor": "schedutil"}
    return {f"{POLICIES}/policy{first}/{name}": content for name, content in (names | files).items()}


def orin(tmp_path: Path) -> Path:
    """A board of two clusters: four cores at 1510.4 MHz and two at 729.6 MHz."""
    files = policy(0, 1510400, "0 1 2 3", scaling_max_freq=1510400, cpuinfo_max_freq=1728000)
    files |= policy(4, 729600, "4 5", scaling_max_freq=1190400) | {"sys/devices/system/cpu/online": "0-5"}
    return grow(tmp_path, files)


def test_the_mean_clock_is_over_the_cpus_that_are_on(tmp_path):
    """(4 x 1510.4 + 2 x 729.6) / 6 = 1250.1333 MHz."""
    found = cpufreq.read(orin(tmp_path), profile(), 7.0)
    values = {name: reading.value for name, reading in found.readings.items()}
    assert values == pytest.approx(
        {
            "cpu.f_hertz": 7500.8e6 / 6,
            "cpu.policy0_hertz": 1510.4e6,
            "cpu.policy0_max_hertz": 1510.4e6,
            "cpu.policy4_hertz": 729.6e6,
            "cpu.policy4_max_hertz": 1190.4e6,
            "cpu.online_count": 6,
        }
    )
    assert found.facts == {"governor": "schedutil"}
    assert found.absent == {}
    assert {(one.at, one.quality) for one in found.readings.values()} == {(7.0, "measured")}


@pytest.mark.parametrize(
    ("file", "quality"),
    [("scaling_cur_freq", "modelled"), ("cpuinfo_cur_freq", "modelled"), ("cpuinfo_avg_freq", "measured")],
)
@pytest.mark.parametrize("tree", [{}, {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n"}])
def test_a_clock_that_nobody_checked_on_such_a_board_is_modelled(tmp_path, file, quality, tree):
    """armbian/build#8701: 2304 MHz announced, 500 counted; what the cores count themselves is measured."""
    root = grow(tmp_path, policy(0, 2304000, **{file: 2304000}) | tree)
    found = cpufreq.read(root, load_for_board(root), 0.0)
    for name in ("cpu.f_hertz", "cpu.policy0_hertz"):
        assert (found.readings[name].quality, found.readings[name].value) == (quality, 2.304e9)
        assert (found.readings[name].uncertainty is None) is (quality == "modelled")


def test_policies_come_by_number(tmp_path):
    """policy10 after policy2."""
    grow(tmp_path, policy(10, 1000000) | policy(2, 1000000))
    assert [folder.name for folder in clocks.find_policies(tmp_path)] == ["policy2", "policy10"]


def test_folders_of_single_cpus_are_not_read(tmp_path):
    """They are the policies' again, and a CPU that is off has none."""
    grow(tmp_path, {"sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 1000000})
    with pytest.raises(NoData) as caught:
        clocks.read_policies(tmp_path, Cpu())
    assert caught.value.lack == "not_present"


def test_a_policy_whose_cpus_are_off_costs_only_its_own_clock(tmp_path):
    files = policy(0, 1200000, "0 3 4 5") | policy(1, 345600) | {f"{POLICIES}/policy1/affected_cpus": ""}
    found = cpufreq.read(grow(tmp_path, files), profile(), 0.0)
    assert found.readings["cpu.f_hertz"].value == pytest.approx(1.2e9)
    assert found.absent["cpu.policy1_hertz"].lack == "busy"


def test_cpus_that_are_off_are_not_counted(tmp_path):
    grow(tmp_path, {"sys/devices/system/cpu/online": "0,3-5\n"})
    assert clocks.read_online_count(tmp_path) == (4, "sys/devices/system/cpu/online")


def test_without_a_list_the_processors_are_counted(tmp_path):
    """A TX2 in a saving mode lists 0, 3, 4 and 5."""
    grow(tmp_path, {"proc/cpuinfo": "".join(f"processor\t: {one}\nCPU part\t: 0xd07\n\n" for one in (0, 3, 4, 5))})
    assert clocks.read_online_count(tmp_path) == (4, "proc/cpuinfo")


@pytest.mark.parametrize("said", ["", "3-1", "0-", "a", "0-99999", "0;1", "-1"])
def test_what_is_no_list_of_cpus_is_refused(said):
    with pytest.raises(NoData) as caught:
        clocks.parse_cpu_list(said)
    assert caught.value.lack == "invalid"


class TestFirmware:
    """A Raspberry Pi's firmware slows the clock without telling Linux."""

    def test_its_word_stands_above_the_files(self, tmp_path):
        """As recorded on a Pi 3B+: Linux says 1400 MHz, the firmware 600."""
        grow(tmp_path, policy(0, 1400000, "0 1 2 3") | {VCGENCMD: "frequency(48)=600062000"})
        found = cpufreq.read(tmp_path, profile(sources=PI.sources), 0.0)
        for name in ("cpu.f_hertz", "cpu.policy0_hertz"):
            assert found.readings[name].value == pytest.approx(600062000)
            assert (found.readings[name].source, found.readings[name].quality) == ("firmware", "measured")

    def test_where_it_refuses_the_files_count_as_modelled_and_the_remedy_is_told(self, tmp_path):
        grow(tmp_path, policy(0, 1400000) | {VCGENCMD: "Can't open device file: /dev/vcio"})
        found = cpufreq.read(tmp_path, profile(sources=PI.sources), 0.0)
        assert (found.readings["cpu.f_hertz"].value, found.readings["cpu.f_hertz"].quality) == (1.4e9, "modelled")
        assert found.readings["cpu.f_hertz"].uncertainty is None
        assert found.absent["cpu.firmware_hertz"].lack == "denied"
        assert "`video`" in found.absent["cpu.firmware_hertz"].cause

    @pytest.mark.parametrize(
        ("name", "sysfs_khz", "hertz"),
        [
            ("measure_clock_vs_scaling_cur_freq.txt", 600000, 700154304),
            ("thermal_capped_snapshot.txt", None, 1141118000),
        ],
    )
    def test_recorded_on_a_pi_4(self, tmp_path, name, sysfs_khz, hertz):
        text = shared("reference", "boards", "rpi-4b", name).read_text()
        answer = next(line.split("\t")[-1] for line in text.splitlines() if "frequency(" in line)
        assert sysfs_khz is None or f"scaling_cur_freq\t{sysfs_khz}" in text
        grow(tmp_path, policy(0, sysfs_khz or 1500000, "0 1 2 3") | {VCGENCMD: answer})
        assert cpufreq.read(tmp_path, profile(sources=PI.sources), 0.0).readings["cpu.f_hertz"].value == hertz


class TestFiles:
    """Which of a policy's three files is read."""

    def test_counted_before_asked_before_set(self, tmp_path):
        files = policy(0, 1, cpuinfo_cur_freq=1200000, cpuinfo_avg_freq=1100000, scaling_cur_freq=1300000)
        grow(tmp_path, files)
        folder = tmp_path / POLICIES / "policy0"
        assert clocks.read_first_clock(folder, clocks.CLOCK_FILES) == ("cpuinfo_avg_freq", 1.1e9)
        (folder / "cpuinfo_avg_freq").unlink()
        assert clocks.read_first_clock(folder, clocks.CLOCK_FILES) == ("cpuinfo_cur_freq", 1.2e9)
        (folder / "cpuinfo_cur_freq").unlink()
        assert clocks.read_first_clock(folder, clocks.CLOCK_FILES) == ("scaling_cur_freq", 1.3e9)

    def test_a_file_for_root_alone_is_passed_over(self):
        """cpuinfo_cur_freq has mode 0400."""
        with open_to_all() as root:
            grow(root, policy(0, 1300000, cpuinfo_cur_freq=1200000))
            (root / POLICIES / "policy0" / "cpuinfo_cur_freq").chmod(0o400)
            with as_nobody():
                (clock,) = clocks.read_policies(root, Cpu()).clocks
        assert (clock.hertz, clock.source, clock.quality) == (1.3e9, "cpufreq scaling_cur_freq", "measured")

    def test_where_none_may_be_read_the_clock_is_denied(self):
        with open_to_all() as root:
            grow(root, policy(0, 1300000))
            (root / POLICIES / "policy0" / "scaling_cur_freq").chmod(0o400)
            with as_nobody():
                found = cpufreq.read(root, profile(), 0.0)
        assert "cpu.f_hertz" not in found.readings
        assert found.absent["cpu.f_hertz"].lack == "denied"

    def test_counters_that_are_asleep_are_passed_over(self, tmp_path):
        """cpuinfo_avg_freq answers EAGAIN while a core idles."""
        grow(tmp_path, policy(0, 1300000))
        with busy(tmp_path / POLICIES / "policy0" / "cpuinfo_avg_freq"):
            (clock,) = clocks.read_policies(tmp_path, Cpu()).clocks
        assert clock.source == "cpufreq scaling_cur_freq"

    def test_a_clock_that_answers_later_is_busy(self, tmp_path):
        grow(tmp_path, policy(0, 1300000))
        with busy(tmp_path / POLICIES / "policy0" / "scaling_cur_freq"):
            found = cpufreq.read(tmp_path, profile(), 0.0)
        assert found.absent["cpu.f_hertz"].lack == "busy"

    @pytest.mark.parametrize("said", ["<unknown>", "", "0", "-1", "1.5e6", "9" * 30, "9" * 400, "9" * 5000])
    def test_what_is_no_clock_is_invalid(self, tmp_path, said):
        found = cpufreq.read(grow(tmp_path, policy(0, said)), profile(), 0.0)
        assert found.absent["cpu.f_hertz"].lack == "invalid"
        assert not any(name.endswith("policy0_hertz") for name in found.readings)

    def test_the_cap_of_now_stands_above_the_hardware_s(self, tmp_path):
        files = policy(0, 600000, scaling_max_freq=918000, cpuinfo_max_freq=1479000)
        found = cpufreq.read(grow(tmp_path, files), profile(), 0.0)
        assert found.readings["cpu.policy0_max_hertz"].value == pytest.approx(918e6)


class TestCorrection:
    """Low clocks of Carmel cores read high: 115 MHz said, 101 measured."""

    CARMEL = Cpu(low_opp_correction=0.88, low_opp_hertz=200e6)

    def test_a_low_clock_is_put_right(self, tmp_path):
        (clock,) = clocks.read_policies(grow(tmp_path, policy(0, 115200)), self.CARMEL).clocks
        assert (clock.hertz, clock.quality) == (pytest.approx(101.376e6), "corrected")

    def test_another_stays(self, tmp_path):
        (clock,) = clocks.read_policies(grow(tmp_path, policy(0, 1907200)), self.CARMEL).clocks
        assert (clock.hertz, clock.quality) == (1907.2e6, "measured")

    def test_a_mean_is_as_good_as_its_worst_part(self, tmp_path):
        grow(tmp_path, policy(0, 1907200) | policy(2, 115200))
        found = cpufreq.read(tmp_path, profile(low_opp_correction=0.88, low_opp_hertz=200e6), 0.0)
        assert found.readings["cpu.f_hertz"].quality == "corrected"
        assert found.readings["cpu.policy0_hertz"].quality == "measured"


class TestCpuinfo:
    """x86 tells clocks in /proc/cpuinfo; on hardware they are counted, in a virtual machine they stand still."""

    def test_recorded_on_a_laptop(self, tmp_path):
        """Eight threads; the first three say 799.998, 800.037 and 800.010 MHz in the recording, or so."""
        text = shared("reference", "boards", "x86-generic", "proc_cpuinfo_i7-8650U.txt").read_text()
        said = [float(line.split(":")[1]) for line in text.splitlines() if line.startswith("cpu MHz")]
        assert said
        grow(tmp_path, {"proc/cpuinfo": text})
        reading = cpufreq.read(tmp_path, profile(), 0.0).readings["cpu.f_hertz"]
        assert reading.value == pytest.approx(1e6 * sum(said) / len(said))
        assert reading.quality == "measured"

    def test_in_a_virtual_machine_it_is_modelled(self, tmp_path):
        text = "processor\t: 0\nflags\t\t: fpu hypervisor lahf_lm\ncpu MHz\t\t: 2596.144\n"
        (clock,) = clocks.read_cpuinfo(grow(tmp_path, {"proc/cpuinfo": text})).clocks
        assert (clock.hertz, clock.quality, clock.cpus) == (pytest.approx(2596.144e6), "modelled", (0,))

    def test_arm_tells_none_there(self, tmp_path):
        text = "processor\t: 0\nBogoMIPS\t: 62.50\nFeatures\t: fp asimd atomics\n"
        with pytest.raises(NoData) as caught:
            clocks.read_cpuinfo(grow(tmp_path, {"proc/cpuinfo": text}))
        assert caught.value.lack == "not_present"


def test_the_nominal_clock_comes_last_and_is_modelled(tmp_path):
    found = cpufreq.read(tmp_path, profile(nominal_hertz=1e9), 0.0)
    reading = found.readings["cpu.f_hertz"]
    assert (reading.value, reading.source, reading.quality) == (1e9, "profile", "modelled")
    assert found.absent.keys() >= {"cpu.cpufreq_hertz", "cpu.cpuinfo_hertz"}


def test_without_any_clock_it_is_absent_and_the_rest_is_there(tmp_path):
    grow(tmp_path, {"sys/devices/system/cpu/online": "0-3"})
    found = cpufreq.read(tmp_path, profile(), 0.0)
    assert found.absent["cpu.f_hertz"].lack == "not_present"
    assert found.readings.keys() == {"cpu.online_count"}


def test_the_recorded_tree_of_a_pc(tmp_path):
    """The counted clock, 3184097 kHz, stands above the driver's; the folder cpu1 holds another and is not read."""
    files = {}
    for line in shared("reference", "boards", "x86-generic", "cpufreq_tree.tsv").read_text().splitlines():
        _, name, content = line.split("\t")
        files[name.lstrip("/")] = content.replace("\\n", "\n")
    found = cpufreq.read(grow(tmp_path, files), profile(), 0.0)
    assert found.readings["cpu.policy0_hertz"].value == pytest.approx(3184097e3)
    assert found.readings["cpu.policy0_max_hertz"].value == pytest.approx(2400000e3)
    assert found.facts == {"governor": "powersave"}
    states = cpufreq.parse_time_in_state(files["sys/devices/system/cpu/cpu1/cpufreq/stats/time_in_state"])
    assert states[2.8e9] == pytest.approx(1724.88)


@pytest.mark.parametrize("said", ["", "garbage", "500000", "500000 1\nx", "-5 1"])
def test_an_invalid_time_in_state_is_refused(said):
    """Empty: a driver that switches too fast to be counted."""
    with pytest.raises(NoData):
        cpufreq.parse_time_in_state(said)
