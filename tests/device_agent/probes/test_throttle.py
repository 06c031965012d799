"""Evidence that a board is slowed down: each source by itself, and all of them together."""

from __future__ import annotations

import pytest

from device_agent.probes import throttle
from device_agent.probes.base import ProbeResult
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Throttle
from shared.errors import NoData
from tests.machine import grow, profile, shared
from tests.naming import naming

HWMON = "sys/class/hwmon"
COOLING = "sys/class/thermal/cooling_device"
POLICY = "sys/devices/system/cpu/cpufreq/policy"
BITS = {
    "0x0": ((0, 0, 0), "none"),
    "0x50000": ((0, 0, 1), "undervoltage since boot, throttled since boot"),
    "0x50005": ((1, 1, 1), "undervoltage, throttled"),
    "0x60002": ((1, 0, 1), "clock capped, throttled since boot"),
    "0x80000": ((0, 0, 1), "soft temperature limit since boot"),
    "0xe0008": ((1, 0, 1), "soft temperature limit, clock capped since boot, throttled since boot"),
    "0x1": ((0, 1, 1), "undervoltage"),
}
"""Bits: (slowed down now, undervoltage now, either since boot), words."""


def ask(root, *sources, **more) -> ProbeResult:
    return throttle.read(root, profile(throttle=Throttle(sources=sources, **more)), 3.0)


def flags(found: ProbeResult) -> dict[str, float]:
    return {name.removeprefix("throttle."): one.value for name, one in found.readings.items()}


def clock(policy: int, allowed: int, most: int) -> dict[str, object]:
    return {f"{POLICY}{policy}/scaling_max_freq": allowed, f"{POLICY}{policy}/cpuinfo_max_freq": most}


COPIES = ("soc/soc:firmware", "soc@107c000000/soc@107c000000:firmware", "firmware")


@pytest.mark.parametrize("bits", BITS)
def test_each_bit_of_the_firmware(tmp_path, bits) -> None:
    (now, low, since), words = BITS[bits]
    expected = {"now_flag": now, "undervoltage_flag": low, "since_boot_flag": since}
    tool = ask(grow(tmp_path / "tool", {"tools/vcgencmd get_throttled": f"throttled={bits}"}), "firmware")
    assert (flags(tool), tool.facts) == (expected, {"throttle": words})


@pytest.mark.parametrize("place", COPIES)
@pytest.mark.parametrize("bits", [bits for bits in BITS if bits != "0x0"])
def test_a_set_bit_of_the_kernels_copy_counts_and_a_clear_one_does_not(tmp_path, bits, place) -> None:
    """Nothing updates the copy, and raspberrypi-hwmon clears its sticky bits: only what is set was ever true."""
    name = f"sys/devices/platform/{place}/get_throttled"
    (now, low, _), words = BITS[bits]
    files = {name: bits.removeprefix("0x"), "tools/vcgencmd get_throttled": "#lack denied"}
    found = ask(grow(tmp_path, files), "firmware")
    expected = {"now_flag": now, "undervoltage_flag": low}
    assert flags(found) == {key: value for key, value in expected.items() if value} | {"since_boot_flag": 1}
    assert {one.source for one in found.readings.values()} == {"kernel copy"}
    assert all(found.absent[f"throttle.{key}"].lack == "denied" for key, value in expected.items() if not value)
    assert found.facts == {"throttle": words}


@pytest.mark.parametrize("place", COPIES)
@pytest.mark.parametrize("refusal", [{"tools/vcgencmd get_throttled": "#lack denied"}, {}])
@pytest.mark.parametrize("others", [{}, clock(0, 1200000, 1200000)])
def test_a_copy_without_a_set_bit_says_nothing(tmp_path, place, refusal, others) -> None:
    """raspberrypi/linux#2367: the firmware said 0x80008 while the copy stayed 0."""
    files = refusal | others | {f"sys/devices/platform/{place}/get_throttled": 0}
    root = grow(tmp_path, files)
    if not refusal and not others:
        with pytest.raises(NoData):
            ask(root, "firmware")
        return
    found = ask(root, "firmware", "cooling_device", "clock")
    assert flags(found) == {}
    lacks = {found.absent[f"throttle.{key}"].lack for key in ("now_flag", "since_boot_flag", "undervoltage_flag")}
    assert lacks == {"denied" if refusal else "not_present"}
    assert found.facts == {"throttle": "unknown"}


@pytest.mark.parametrize(("copy", "alarm"), [("1", 0), ("50005", 0), ("0", 1), ("50000", 1)])
def test_the_voltage_alarm_is_newer_than_the_copy(tmp_path, copy, alarm) -> None:
    files = {
        "sys/devices/platform/soc/soc:firmware/get_throttled": copy,
        f"{HWMON}/hwmon1/name": "rpi_volt",
        f"{HWMON}/hwmon1/in0_lcrit_alarm": alarm,
    }
    found = ask(grow(tmp_path, files), "firmware")
    assert found.readings["throttle.undervoltage_flag"].value == alarm
    assert found.readings["throttle.since_boot_flag"].value == 1


def test_the_recorded_answers(tmp_path) -> None:
    values = shared("reference/boards").glob("*/get_throttled_values.txt")
    seen = 0
    for line in (line for path in values for line in path.read_text().split()):
        found = ask(grow(tmp_path, {"tools/vcgencmd get_throttled": line}), "firmware")
        (now, low, since), words = BITS[line.removeprefix("throttled=")]
        assert flags(found) == {"now_flag": now, "undervoltage_flag": low, "since_boot_flag": since}
        assert found.facts["throttle"] == words
        seen += 1
    assert seen == len(BITS) - 1


def test_the_firmwares_own_word_comes_before_the_copy(tmp_path) -> None:
    files = {"tools/vcgencmd get_throttled": "throttled=0x0", "sys/devices/platform/firmware/get_throttled": "50005"}
    assert ask(grow(tmp_path, files), "firmware").facts == {"throttle": "none"}


@pytest.mark.parametrize("alarm", [0, 1])
def test_without_both_the_voltage_alarm_tells_of_undervoltage_only(tmp_path, alarm) -> None:
    files = {f"{HWMON}/hwmon1/name": "rpi_volt", f"{HWMON}/hwmon1/in0_lcrit_alarm": alarm}
    found = ask(grow(tmp_path, files), "firmware")
    assert flags(found) == {"undervoltage_flag": 1, "since_boot_flag": 1} if alarm else {"undervoltage_flag": 0}
    assert found.readings["throttle.undervoltage_flag"].source == "rpi_volt alarm"
    assert found.facts == {"throttle": "undervoltage" if alarm else "unknown"}


def test_a_board_without_a_detector_has_no_flag(tmp_path) -> None:
    """Its firmware says 0 always, which is not zero but absent."""
    root = grow(tmp_path, {"tools/vcgencmd get_throttled": "throttled=0x80008"})
    found = ask(root, "firmware", senses_undervoltage=False)
    assert flags(found) == {"now_flag": 1, "since_boot_flag": 1}
    assert found.absent["throttle.undervoltage_flag"].lack == "not_present"


PI_TOKENS = {
    "raspberrypi,4-compute-module": "brcm,bcm2711",
    "raspberrypi,4-compute-module-s": "brcm,bcm2711",
    "raspberrypi,3-compute-module": "brcm,bcm2837",
    "raspberrypi,compute-module": "brcm,bcm2835",
    "raspberrypi,model-zero-w": "brcm,bcm2835",
}


@pytest.mark.parametrize("token", [*PI_TOKENS, "raspberrypi,4-model-b", "raspberrypi,5-compute-module"])
@pytest.mark.parametrize("place", throttle.COMPATIBLE_FILES)
def test_a_compute_module_has_no_undervoltage_flag_that_is_down(tmp_path, token, place) -> None:
    """Only a CM5 senses it, by its power management chip; a flag that is up was true on every board."""
    has_detector = token not in PI_TOKENS
    for bits, value in (("0x0", 0), ("0x50005", 1)):
        tokens = f"{token}\0{PI_TOKENS.get(token, 'brcm,bcm2711')}\0"
        root = grow(tmp_path / bits, {place: tokens, "tools/vcgencmd get_throttled": f"throttled={bits}"})
        found = throttle.read(root, load_for_board(root), 3.0)
        assert found.readings["throttle.now_flag"].value == value
        if value or has_detector:
            assert found.readings["throttle.undervoltage_flag"].value == value
        else:
            assert found.absent["throttle.undervoltage_flag"].lack == "not_present"


STEPS = "600000 900000 1200000 1500000 1800000"


@pytest.mark.parametrize(
    ("allowed", "steps", "intended", "is_throttled"),
    [
        (1_200_000, STEPS, 1.2e9, False),
        (1_200_000, STEPS, 1.3e9, False),  # rounded down to a step
        (900_000, STEPS, 1.3e9, True),  # something else took more
        (1_500_000, STEPS, 1.2e9, False),
        (1_200_000, STEPS, 0.0, True),
        (1_200_000, "", 1.25e9, False),  # rounded to steps of the driver's own
        (1_000_000, "", 1.25e9, True),
        (900_000, "", 1.0e9, False),
    ],
)
def test_a_clock_that_is_capped_on_purpose_is_not_throttled(tmp_path, allowed, steps, intended, is_throttled) -> None:
    files = clock(0, allowed, 1_800_000) | ({f"{POLICY}0/scaling_available_frequencies": steps} if steps else {})
    found = ask(grow(tmp_path, files), "clock", intended_max_hertz=intended)
    assert flags(found) == {"now_flag": is_throttled}
    assert (found.facts["throttle"] == "none") is not is_throttled


def test_a_recorded_orin_counts_over_currents(tmp_path) -> None:
    lines = shared("reference/boards/jetson-orin-nano/soctherm_oc_hwmon.tsv").read_text().splitlines()
    root = grow(tmp_path, {f"sys/{path}": value for path, value in (line.split("\t") for line in lines)})
    found = ask(root, "soctherm")
    assert flags(found) == {"since_boot_flag": 1, "overcurrent_count": 27390}
    assert found.facts == {"throttle": "over-current since boot"}


def test_the_first_counter_is_of_undervoltage(tmp_path) -> None:
    counts = {f"{HWMON}/hwmon0/oc{number}_event_cnt": count for number, count in ((1, 5), (2, 0), (3, 0))}
    found = ask(grow(tmp_path, {f"{HWMON}/hwmon0/name": "soctherm_oc"} | counts), "soctherm")
    assert flags(found) == {"since_boot_flag": 1, "overcurrent_count": 0}
    assert found.facts == {"throttle": "undervoltage since boot"}


def test_an_alarm_names_its_rail(tmp_path) -> None:
    files = {
        f"{HWMON}/hwmon4/name": "ina3221",
        f"{HWMON}/hwmon4/in1_label": "VDD_IN",
        f"{HWMON}/hwmon4/curr1_crit_alarm": 1,
        f"{HWMON}/hwmon4/curr1_max_alarm": 1,
        f"{HWMON}/hwmon4/curr2_crit_alarm": 0,
        f"{HWMON}/hwmon4/curr4_crit_alarm": 1,
        f"{HWMON}/hwmon5/name": "other",
        f"{HWMON}/hwmon5/curr3_crit_alarm": 1,
    }
    found = ask(grow(tmp_path, files), "ina3221_alarm")
    assert flags(found) == {"now_flag": 1}
    assert found.facts == {"throttle": "over-current on VDD_IN, over-current on channel 4"}


@pytest.mark.parametrize(("state", "now"), [(0, 0), (3, 1)])
def test_a_cooling_device_that_takes_speed(tmp_path, state, now) -> None:
    """A fan that turns is none; a state of -1, or none at all, says nothing."""
    files = {
        f"{COOLING}0/type": "pwm-fan",
        f"{COOLING}0/cur_state": 4,
        f"{COOLING}1/type": "thermal-cpufreq-0",
        f"{COOLING}1/cur_state": state,
        f"{COOLING}2/type": "intel_powerclamp",
        f"{COOLING}2/cur_state": -1,
        f"{COOLING}3/type": "Processor",
    }
    found = ask(grow(tmp_path, files), "cooling_device")
    assert flags(found) == {"now_flag": now}
    assert found.facts == {"throttle": "thermal-cpufreq-0 cools by slowing down" if state else "none"}


@pytest.mark.parametrize(("kind", "state"), [("Fan", 1), ("intel_powerclamp", -1)])
def test_a_fan_or_what_is_off_says_nothing(tmp_path, kind, state) -> None:
    with pytest.raises(NoData, match=naming(tmp_path / "sys/class/thermal")):
        ask(grow(tmp_path, {f"{COOLING}0/type": kind, f"{COOLING}0/cur_state": state}), "cooling_device")


def test_a_capped_clock_counts_only_where_nobody_knows_better(tmp_path) -> None:
    """A power mode caps clocks as well; a cooling device at rest says that it is no heat. The words tell it anyway."""
    capped = clock(0, 1200000, 1500000) | clock(4, 1800000, 1800000)
    alone = ask(grow(tmp_path / "alone", capped), "cooling_device", "clock")
    now = alone.readings["throttle.now_flag"]
    assert (now.value, now.source, now.quality, now.unit, now.at) == (1, "clock", "modelled", "flag", 3.0)
    cool = {f"{COOLING}0/type": "cpufreq-cpu0", f"{COOLING}0/cur_state": 0}
    both = ask(grow(tmp_path / "both", capped | cool), "cooling_device", "clock")
    now = both.readings["throttle.now_flag"]
    assert (now.value, now.source, now.quality) == (0, "cooling_device", "measured")
    assert both.facts == alone.facts == {"throttle": "clock capped at 1200 of 1500 MHz"}
    free = ask(grow(tmp_path / "free", clock(0, 1500000, 1500000)), "clock")
    assert (flags(free), free.facts) == ({"now_flag": 0}, {"throttle": "none"})


def test_any_source_raises_the_flag_and_what_was_refused_is_told(tmp_path) -> None:
    files = {
        "tools/vcgencmd get_throttled": "#lack denied",
        f"{COOLING}0/type": "cpufreq-cpu0",
        f"{COOLING}0/cur_state": 0,
        f"{HWMON}/hwmon0/name": "ina3221",
        f"{HWMON}/hwmon0/curr1_crit_alarm": 1,
    }
    found = ask(grow(tmp_path, files), "firmware", "soctherm", "cooling_device", "ina3221_alarm")
    assert flags(found) == {"now_flag": 1}
    assert found.readings["throttle.now_flag"].source == "ina3221_alarm"
    unknown = ("firmware", "undervoltage_flag", "since_boot_flag")
    assert {name: lack.lack for name, lack in found.absent.items()} == {
        f"throttle.{name}": "denied" for name in unknown
    }


def test_where_no_source_answers_there_is_no_figure(tmp_path) -> None:
    for sources in ((), ("firmware", "soctherm", "ina3221_alarm", "cooling_device", "clock")):
        with pytest.raises(NoData) as told:
            ask(tmp_path, *sources)
        assert told.value.lack == "not_present"
