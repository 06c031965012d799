"""The board's power: which source is taken, what its total is, and what is reported beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from device_agent.config import MeterConfig
from device_agent.probes.power import source as power
from device_agent.probes.power.http_meter import HttpMeter
from device_agent.probes.power.model import ModelSource
from device_agent.probes.power.rapl import RaplSource
from device_agent.probes.power.source import TOTAL_WATTS, open_source
from device_agent.profile.schema import Power, PowerModel, Profile, Rail
from shared.errors import NoData
from tests.boards import material
from tests.machine import as_nobody, grow, open_to_all, shared

MODEL = PowerModel(idle_w=2.0, max_w=9.0, core_joules_per_cycle=0.5e-9, max_hertz=2e9)
ORIN_NANO = Power(
    sources=("ina3221", "tegrastats", "model"),
    total=("VDD_IN",),
    rails=(
        Rail(label="VDD_IN", role="total"),
        Rail(label="VDD_CPU_GPU_CV", child_of="VDD_IN"),
        Rail(label="VDD_SOC", child_of="VDD_IN"),
    ),
    scope="module",
    valid_w=(0.5, 60.0),
)
AGX_ORIN = Power(
    sources=("ina3221", "tegrastats"),
    total=("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    rails=(Rail(label="VDDQ_VDD2_1V8AO", child_of="VIN_SYS_5V0"),),
    scope="module",
)
PI_5 = Power(sources=("pmic", "model"), gain=1.1451, offset_w=0.5879, uncertainty=0.05)
X86 = Power(sources=("rapl", "battery", "model"), scope="package")
HWMON, TEGRASTATS = "sys/class/hwmon/hwmon3", "tools/tegrastats --interval 100"
PACKAGE = "sys/class/powercap/intel-rapl:0"
COMPUTING = {
    "proc/stat": "cpu  100 0 0 900 0 0 0 0 0 0",
    "sys/devices/system/cpu/online": "0",
    "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "1000000",
    "sys/devices/system/cpu/cpufreq/policy0/affected_cpus": "0",
}
RAPL = {f"{PACKAGE}/name": "package-0", f"{PACKAGE}/energy_uj": "7000000", f"{PACKAGE}/max_energy_range_uj": "9" * 12}


def board(table: Power) -> Profile:
    return Profile(schema=1, id="board", name="Board", power=table)


def rails(**watts: float) -> dict[str, object]:
    """An INA3221 whose rails run at 5 V."""
    files: dict[str, object] = {f"{HWMON}/name": "ina3221"}
    for number, (label, value) in enumerate(watts.items(), 1):
        files |= {f"{HWMON}/in{number}_label": label, f"{HWMON}/in{number}_input": 5000}
        files |= {f"{HWMON}/curr{number}_input": round(value * 200)}
    return files


def ticking() -> float:
    ticking.now += 0.25  # type: ignore[attr-defined]
    return ticking.now  # type: ignore[attr-defined,no-any-return]


ticking.now = 0.0  # type: ignore[attr-defined]


def of_record(board_name: str, recording: str, root: Path) -> Path:
    text = shared("reference", "boards", board_name, recording).read_text()
    match recording.partition("_")[0]:
        case "lm":
            return material.write(material.lm_sensors(text), root)
        case "pmic":
            return grow(root, {"tools/vcgencmd pmic_read_adc": text})
        case "tegrastats":
            return grow(root, {TEGRASTATS: text.splitlines()[-1]})
    return material.write(material.tsv(text), root)


@pytest.mark.parametrize(
    ("recording", "table", "watts", "source", "quality"),
    [
        ("jetson-orin-nano/lm_sensors_4vy7.txt", ORIN_NANO, 5.145, "ina3221 VDD_IN", "measured"),
        ("jetson-orin-nano/lm_sensors_4Ebd.txt", ORIN_NANO, 4.848, "ina3221 VDD_IN", "measured"),
        ("jetson-orin-nano/lm_sensors_87lq.txt", ORIN_NANO, 6.1254, "ina3221 VDD_IN", "measured"),
        ("jetson-orin-nano/tegrastats_jp6_lines.txt", ORIN_NANO, 4.548, "tegrastats VDD_IN", "measured"),
        (
            "jetson-agx-orin/lm_sensors_4ax9.txt",
            AGX_ORIN,
            10.138,
            "ina3221 VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0",
            "measured",
        ),
        (
            "jetson-agx-orin/tegrastats_lines.txt",
            AGX_ORIN,
            9.11,
            "tegrastats VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0",
            "measured",
        ),
        (
            "jetson-agx-xavier/tegrastats_l4t31.txt",
            Power(sources=("tegrastats",), total=("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")),
            3.113,
            "tegrastats sum of 6 rails",
            "measured",
        ),
        (
            "jetson-nano/ina3221x_iio_tree.tsv",
            Power(sources=("ina3221",), total=("POM_5V_IN",)),
            0.9,
            "ina3221 POM_5V_IN",
            "measured",
        ),
        ("rpi-5/pmic_read_adc_4cores_busy.txt", PI_5, 8.88, "pmic sum of 12 rails", "corrected"),
        ("x86-generic/power_supply_bat0_tree.tsv", X86, 5.002, "battery BAT0", "measured"),
    ],
)
def test_a_recorded_board_has_its_total_read_once_and_again(recording, table, watts, source, quality, tmp_path) -> None:
    """The stateless probe and the open source say the same; both name where it comes from."""
    root, profile = of_record(*recording.split("/"), tmp_path), board(table)
    found = power.read(root, profile, 7.0)
    reading, opened = found.readings[TOTAL_WATTS], open_source(root, profile, ticking)
    assert reading.value == pytest.approx(watts, abs=0.005)
    assert (reading.source, reading.quality, reading.unit, reading.at) == (source, quality, "watts", 7.0)
    assert reading.uncertainty == pytest.approx(table.uncertainty * reading.value)
    assert (opened.read().value, opened.kind) == (reading.value, "instant")
    assert (opened.provenance.source, opened.provenance.quality) == (source, quality)
    assert opened.provenance.uncertainty == table.uncertainty
    assert found.facts["power.scope"] == ("machine" if "bat0" in recording else table.scope)


def test_children_and_unknown_rails_are_reported_and_never_added(tmp_path) -> None:
    root = grow(tmp_path, rails(VDD_IN=10.0, VDD_SOC=3.0, SURPRISE=4.0))
    found = power.read(root, board(ORIN_NANO), 0.0)
    assert {name: reading.value for name, reading in found.readings.items()} == pytest.approx(
        {"power.VDD_IN_watts": 10.0, "power.VDD_SOC_watts": 3.0, "power.SURPRISE_watts": 4.0, TOTAL_WATTS: 10.0}
    )


def test_a_missing_part_of_the_total_is_never_a_smaller_sum(tmp_path) -> None:
    """Its rails are still reported; with no other source the total is absent."""
    root = grow(tmp_path, rails(VDD_GPU_SOC=3.0, VDD_CPU_CV=2.0))
    found = power.read(root, board(AGX_ORIN), 0.0)
    assert found.readings.keys() == {"power.VDD_GPU_SOC_watts", "power.VDD_CPU_CV_watts"}
    assert found.absent[TOTAL_WATTS].lack == "not_present"
    assert "VIN_SYS_5V0" in found.absent[TOTAL_WATTS].cause
    with pytest.raises(NoData, match="VIN_SYS_5V0"):
        open_source(root, board(AGX_ORIN), ticking)


def test_the_next_source_steps_in_and_the_first_ones_rails_stay(tmp_path) -> None:
    line = "VDD_GPU_SOC 3000mW/1mW VDD_CPU_CV 2000mW/1mW VIN_SYS_5V0 5000mW/1mW"
    root = grow(tmp_path, rails(VDD_GPU_SOC=3.5) | {TEGRASTATS: line})
    found = power.read(root, board(AGX_ORIN), 0.0)
    assert found.readings[TOTAL_WATTS].value == pytest.approx(10.0)
    assert found.readings["power.VDD_GPU_SOC_watts"].value == pytest.approx(3.5)
    source = open_source(root, board(AGX_ORIN), ticking)
    assert source.read().value == pytest.approx(10.0)
    assert source.period_s == 5.0


@pytest.mark.parametrize("watts", [0.0, 0.4, 61.0])
def test_a_total_that_cannot_be_true_is_invalid(watts, tmp_path) -> None:
    table = Power(sources=("ina3221",), total=("VDD_IN",), valid_w=(0.5, 60.0))
    root = grow(tmp_path, rails(VDD_IN=watts))
    assert power.read(root, board(table), 0.0).absent[TOTAL_WATTS].lack == "invalid"
    with pytest.raises(NoData) as caught:
        open_source(root, board(table), ticking)
    assert caught.value.lack == "invalid"


def test_a_correction_makes_no_power_out_of_nothing(tmp_path) -> None:
    """An offset alone would pass for half a watt."""
    table = Power(sources=("ina3221",), total=("VDD_IN",), offset_w=0.6)
    assert power.read(grow(tmp_path, rails(VDD_IN=0.0)), board(table), 0.0).absent[TOTAL_WATTS].lack == "invalid"


def test_a_correction_is_for_the_boards_own_sensor(tmp_path) -> None:
    """A meter in the supply line sees everything already."""
    table = Power(sources=("ina2xx", "pmic"), gain=2.0)
    root = grow(tmp_path, {f"{HWMON}/name": "ina219", f"{HWMON}/power1_input": 4_000_000})
    reading = power.read(root, board(table), 0.0).readings[TOTAL_WATTS]
    assert (reading.value, reading.quality, reading.source) == (pytest.approx(4.0), "measured", "ina2xx ina219")


def test_a_profile_that_counts_twice_gives_no_total(tmp_path) -> None:
    """Nobody loads such a profile; should one come here all the same, no figure leaves."""
    table = Power(sources=("ina3221",), total=("VDD_IN", "VDD_SOC"), rails=ORIN_NANO.rails)
    found = power.read(grow(tmp_path, rails(VDD_IN=5.0, VDD_SOC=1.0)), board(table), 0.0)
    assert (found.absent[TOTAL_WATTS].lack, "VDD_SOC" in found.absent[TOTAL_WATTS].cause) == ("invalid", True)


def test_counters_are_reported_as_joules_and_opened_as_means(tmp_path) -> None:
    root = grow(tmp_path, RAPL)
    found = power.read(root, board(X86), 3.0)
    assert found.readings["power.package-0_joules"].value == 7.0
    assert (found.absent[TOTAL_WATTS].lack, found.facts) == ("busy", {"power.scope": "package"})
    source = open_source(root, board(X86), ticking)
    assert isinstance(source, RaplSource)
    assert (source.kind, source.period_s) == ("mean", 0.2)


def test_denied_counters_are_told_where_a_worse_source_steps_in() -> None:
    """With the remedy; the total then is that of the model, which takes two reads."""
    profile = board(Power(sources=("rapl", "battery", "model"), model=MODEL))
    with open_to_all() as root:
        grow(root, RAPL | COMPUTING)
        (root / PACKAGE / "energy_uj").chmod(0o400)
        with as_nobody():
            found, source = power.read(root, profile, 0.0), open_source(root, profile, ticking)
    assert found.absent["power.rapl"].lack == "denied"
    assert "tmpfiles.d" in found.absent["power.rapl"].cause
    assert (found.absent[TOTAL_WATTS].lack, found.readings) == ("denied", {})
    assert found.facts == {"power.scope": "board"}
    assert "power.battery" not in found.absent
    assert (source.provenance.quality, source.provenance.source) == ("modelled", "model")


def test_a_battery_on_its_charger_gives_way_to_the_model(tmp_path) -> None:
    supply = "sys/class/power_supply/BAT0"
    root = grow(tmp_path, COMPUTING | {f"{supply}/type": "Battery", f"{supply}/status": "Full"})
    profile = board(Power(sources=("battery", "model"), model=MODEL))
    assert power.read(root, profile, 0.0).absent["power.battery"].lack == "busy"
    assert isinstance(open_source(root, profile, ticking), ModelSource)


def test_a_calibrated_model_stands_for_the_profiles_but_not_for_a_sensor(tmp_path) -> None:
    fitted = PowerModel(idle_w=3.0, max_w=8.0, core_joules_per_cycle=1e-9, max_hertz=2e9, uncertainty=0.07)
    profile = board(Power(sources=("ina3221", "model"), total=("VDD_IN",), model=MODEL))
    source = open_source(grow(tmp_path, COMPUTING), profile, ticking, calibrated=fitted)
    assert (source.provenance.source, source.provenance.uncertainty) == ("calibrated model", 0.07)
    source = open_source(grow(tmp_path, rails(VDD_IN=5.0)), profile, ticking, calibrated=fitted)
    assert source.provenance.source == "ina3221 VDD_IN"


def test_a_configured_meter_is_the_source_whatever_the_board_has(tmp_path) -> None:
    """Even while it does not answer: figures of the module must not pass for those of the wall."""
    meter = MeterConfig(kind="shelly", url="http://127.0.0.1:9", period_s=3.0)
    source = open_source(grow(tmp_path, rails(VDD_IN=5.0)), board(ORIN_NANO), ticking, meter=meter)
    assert isinstance(source, HttpMeter)
    assert (source.period_s, source.provenance.source) == (3.0, "http shelly")


def test_an_open_source_reads_on_through_a_moment_of_silence(tmp_path) -> None:
    root = grow(tmp_path, rails(VDD_IN=5.0))
    source = open_source(root, board(ORIN_NANO), ticking)
    grow(root, {f"{HWMON}/curr1_input": "garbage"})
    with pytest.raises(NoData) as caught:
        source.read()
    assert caught.value.lack == "invalid"
    grow(root, {f"{HWMON}/curr1_input": 1200})
    assert source.read().value == pytest.approx(6.0)


@pytest.mark.parametrize(
    "garbage", [b"", b"\0\0", b"-1", b"9" * 400, b"9" * 5000, b"nan", b"1e400", b"\xff\xfe", b"NC"]
)
def test_no_content_of_a_file_is_more_than_an_absence(garbage, tmp_path) -> None:
    """Each file of each source in turn: nothing but NoData comes out, and no figure beyond measure."""
    supply, meter = "sys/class/power_supply/BAT0", "sys/class/hwmon/hwmon9"
    trees: list[tuple[tuple[str, ...], dict[str, object]]] = [
        (("ina3221",), rails(VDD_IN=5.0)),
        (("tegrastats",), {TEGRASTATS: "VDD_IN 5000/5000"}),
        (("pmic",), {"tools/vcgencmd pmic_read_adc": "VDD_IN_A current(1)=1.0A\nVDD_IN_V volt(2)=5.0V"}),
        (("rapl",), RAPL),
        (("ina2xx",), {f"{meter}/name": "ina219", f"{meter}/power1_input": 5_000_000}),
        (("battery",), {f"{supply}/{name}": "9000000" for name in ("current_now", "voltage_now")}),
        (("model",), COMPUTING),
    ]
    trees[5][1].update({f"{supply}/type": "Battery", f"{supply}/status": "Discharging"})
    for number, (sources, files) in enumerate(trees):
        profile = board(Power(sources=sources, total=("VDD_IN",), model=MODEL))
        for name in files:
            root = grow(tmp_path / str(number), files)
            source = open_source(root, profile, ticking)
            (root / name).write_bytes(garbage)
            with contextlib.suppress(NoData):
                found = power.read(root, profile, 0.0)
                assert all(abs(reading.value) < 1e12 for reading in found.readings.values())
            for _ in range(3):
                with contextlib.suppress(NoData):
                    assert 0 < source.read().value < 1000


@pytest.mark.parametrize(("sample_hz", "max_hz", "period"), [(5.0, 20.0, 0.2), (5.0, 2.0, 0.5)])
def test_the_pause_is_the_profiles_and_the_cost_measured(sample_hz, max_hz, period, tmp_path) -> None:
    """The clock of this test moves by a quarter of a second at every look."""
    table = Power(sources=("ina3221",), total=("VDD_IN",), sample_hz=sample_hz, max_hz=max_hz)
    source = open_source(grow(tmp_path, rails(VDD_IN=5.0)), board(table), ticking)
    assert source.period_s == pytest.approx(period)
    assert source.cost_s == pytest.approx(0.5)


@pytest.mark.parametrize("sources", [(), ("http",), ("ina3221", "pmic", "rapl", "ina2xx", "battery", "tegrastats")])
def test_a_board_without_any_source_is_no_fault(sources, tmp_path) -> None:
    profile = board(Power(sources=sources, model=None))
    assert power.read(tmp_path, profile, 0.0).absent[TOTAL_WATTS].lack == "not_present"
    with pytest.raises(NoData) as caught:
        open_source(tmp_path, profile, ticking)
    assert caught.value.lack == "not_present"


def chip(number: int, name: str, **files: object) -> dict[str, object]:
    folder = f"sys/class/hwmon/hwmon{number}"
    return {f"{folder}/name": name} | {f"{folder}/{file}": content for file, content in files.items()}


def ups(milliamperes: int, millivolts: int, number: int = 7) -> dict[str, object]:
    """An INA219 whose power register has no sign."""
    power_uw = abs(milliamperes) * millivolts
    return chip(number, "ina219", curr1_input=milliamperes, in1_input=millivolts, power1_input=power_uw)


PI_4 = Power(sources=("ina2xx", "ina3221", "model"), supply_v=(4.4, 5.5), model=MODEL)


@pytest.mark.parametrize(
    ("files", "lack"),
    [
        (ups(-804, 4116), "busy"),  # charges: networkupstools/nut#2430
        (ups(-804, 5100), "busy"),
        (ups(900, 3700), "invalid"),  # discharges at the volts of a lithium cell
        (ups(900, 8200), "invalid"),  # of two in series
        (ups(900, 12300), "invalid"),
    ],
)
def test_a_chip_at_the_battery_of_a_ups_is_not_the_boards_draw(files, lack, tmp_path) -> None:
    """The model steps in, and is told as one; the rail is what it is, with the sign of its current."""
    root = grow(tmp_path, COMPUTING | files)
    found = power.read(root, board(PI_4), 0.0)
    assert TOTAL_WATTS not in found.readings
    assert found.absent["power.ina2xx"].lack == found.absent[TOTAL_WATTS].lack == lack
    volts, amperes = files["sys/class/hwmon/hwmon7/in1_input"], files["sys/class/hwmon/hwmon7/curr1_input"]
    assert found.readings["power.ina219_watts"].value == pytest.approx(volts * amperes * 1e-6)
    assert open_source(root, board(PI_4), ticking).provenance.quality == "modelled"


def test_a_chip_that_turns_to_charging_makes_a_gap(tmp_path) -> None:
    """The source was opened while the current flowed the right way."""
    root = grow(tmp_path, COMPUTING | ups(900, 5100))
    source = open_source(root, board(PI_4), ticking)
    assert source.read().value == pytest.approx(4.59)
    for files in (ups(-900, 5100), ups(900, 4000)):
        grow(root, files)
        with pytest.raises(NoData):
            source.read()


def test_a_chip_at_the_supply_is_the_total(tmp_path) -> None:
    found = power.read(grow(tmp_path, ups(900, 5020)), board(PI_4), 0.0)
    assert found.readings[TOTAL_WATTS].value == pytest.approx(4.518)
    assert found.facts == {"power.scope": "board"}


def test_a_chip_without_a_power_register_is_volts_times_amperes(tmp_path) -> None:
    files = chip(7, "ina226", curr1_input=900, in1_input=5000)
    assert power.read(grow(tmp_path, files), board(PI_4), 0.0).readings[TOTAL_WATTS].value == pytest.approx(4.5)


@pytest.mark.parametrize("file", ["curr1_input", "in1_input"])
def test_a_chip_whose_direction_or_voltage_does_not_answer_is_no_total(file, tmp_path) -> None:
    files = ups(900, 5020) | {f"sys/class/hwmon/hwmon7/{file}": "#lack busy"}
    found = power.read(grow(tmp_path, files), board(PI_4), 0.0)
    assert found.readings == {}
    assert found.absent["power.ina219_watts"].lack == "busy"


def test_the_meter_may_be_a_chip_of_the_board(tmp_path) -> None:
    """Of several the one that is named, also where its volts are no supply's; never while it charges, nor another."""
    module = chip(3, "ina3221", in1_label="board", in1_input=5100, curr1_input=800)
    files = ups(900, 8200) | ups(500, 5000, number=8) | module
    root = grow(tmp_path, COMPUTING | files)
    assert TOTAL_WATTS not in power.read(root, board(PI_4), 0.0).readings
    for name, watts in (("ina219-hwmon7", 7.38), ("ina219-hwmon8", 2.5), ("board", 4.08)):
        source = open_source(root, board(PI_4), ticking, meter=MeterConfig(kind="chip", chip=name, period_s=0.5))
        reading = source.read()
        assert (reading.value, reading.quality) == (pytest.approx(watts), "measured")
        assert (source.period_s, source.kind) == (0.5, "instant")
    grow(root, {"sys/class/hwmon/hwmon3/curr1_input": -800})
    with pytest.raises(NoData) as caught:
        source.read()
    assert caught.value.lack == "busy"
    with pytest.raises(NoData, match="ina219-hwmon7, ina219-hwmon8"):
        open_source(root, board(PI_4), ticking, meter=MeterConfig(kind="chip", chip="ina226")).read()


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "chip"},
        {"kind": "chip", "chip": "ina219", "url": "http://192.0.2.7"},
        {"kind": "shelly", "url": "http://192.0.2.7", "chip": "ina219"},
        {"kind": "shelly", "chip": "ina219"},
    ],
)
def test_a_meter_is_a_chip_or_an_address(keys) -> None:
    with pytest.raises(ValueError, match=r"chip|url"):
        MeterConfig(**keys)


def test_rails_of_all_sensors_are_read_beside_the_first_total(tmp_path) -> None:
    """An INA226 that was added to a Jetson, or a module of three channels, whatever has the total."""
    added = chip(8, "ina226", curr1_input=2000, in1_input=19000, power1_input=38_000_000)
    module = chip(9, "ina3221", in1_input=5000, curr1_input=-300, in2_input=12000, curr2_input=100)
    table = Power(sources=("ina3221", "tegrastats", "ina2xx"), total=("VDD_IN",), rails=ORIN_NANO.rails)
    found = power.read(grow(tmp_path, rails(VDD_IN=10.0) | added | module), board(table), 0.0)
    assert {name: one.value for name, one in found.readings.items()} == pytest.approx(
        {
            "power.VDD_IN_watts": 10.0,
            "power.ina226_watts": 38.0,
            "power.ina3221-hwmon9-1_watts": -1.5,
            "power.ina3221-hwmon9-2_watts": 1.2,
            TOTAL_WATTS: 10.0,
        }
    )
    assert found.readings[TOTAL_WATTS].source == "ina3221 VDD_IN"


def test_a_rail_of_the_board_never_flows_backwards(tmp_path) -> None:
    """A little less than nothing is a sensor's offset; more is a fault."""
    for watts, lacks in ((-0.4, False), (-3.0, True)):
        found = power.read(grow(tmp_path, rails(VDD_IN=10.0, VDD_SOC=watts)), board(ORIN_NANO), 0.0)
        assert ("power.VDD_SOC_watts" in found.absent) is lacks
