"""The INA3221 by either driver: rails by label, in watts, and nothing that is no rail."""

from __future__ import annotations

import pytest

from device_agent.probes.power import ina3221
from shared.errors import NoData
from tests.boards import material
from tests.machine import busy, grow, shared

CHIP = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon7"


def chip(folder: str = CHIP, **files: object) -> dict[str, object]:
    return {f"{folder}/name": "ina3221"} | {f"{folder}/{name}": content for name, content in files.items()}


def rail(number: int, label: str, millivolts: int, milliamperes: int) -> dict[str, object]:
    return {f"in{number}_label": label, f"in{number}_input": millivolts, f"curr{number}_input": milliamperes}


@pytest.mark.parametrize(
    ("board", "recording", "watts"),
    [
        ("jetson-orin-nano", "lm_sensors_4vy7.txt", {"VDD_IN": 5.145, "VDD_CPU_GPU_CV": 0.74328, "VDD_SOC": 1.5288}),
        ("jetson-orin-nano", "lm_sensors_4Ebd.txt", {"VDD_IN": 4.848, "VDD_CPU_GPU_CV": 0.68544, "VDD_SOC": 1.4948}),
        ("jetson-orin-nano", "lm_sensors_87lq.txt", {"VDD_IN": 6.1254, "VDD_CPU_GPU_CV": 1.3944, "VDD_SOC": 1.55376}),
        ("jetson-orin-nano", "ina3221_hwmon_tree.tsv", {"VDD_IN": 5.145, "VDD_CPU_GPU_CV": 0.74328, "VDD_SOC": 1.5288}),
        *(
            (
                "jetson-agx-orin",
                recording,
                {"VDD_GPU_SOC": 4.7952, "VDD_CPU_CV": 1.5984, "VIN_SYS_5V0": 3.7444, "VDDQ_VDD2_1V8AO": 0.7084},
            )
            for recording in ("lm_sensors_4ax9.txt", "ina3221_hwmon_tree.tsv")
        ),
        ("jetson-nano", "ina3221x_iio_tree.tsv", {"POM_5V_IN": 0.9, "POM_5V_GPU": 0.0, "POM_5V_CPU": 0.123}),
    ],
)
def test_a_recorded_board_gives_its_rails(board, recording, watts, tmp_path) -> None:
    """Volts times amperes of each labelled channel; no NC, no shunt voltage, no sum of channels."""
    turn = material.lm_sensors if recording.startswith("lm_sensors") else material.tsv
    content = shared("reference", "boards", board, recording).read_text()
    rails = ina3221.open_sensor(material.write(turn(content), tmp_path))(None)
    assert rails.watts == pytest.approx(watts)
    assert (rails.lacks, rails.total_labels) == ({}, ())


def test_below_the_class_and_below_the_driver_it_is_one_chip(tmp_path) -> None:
    """On a board both paths lead to it; in a copied folder both may be whole folders."""
    files = chip(**rail(1, "VDD_IN", 5000, 100)) | chip("sys/class/hwmon/hwmon7", **rail(1, "VDD_IN", 5000, 100))
    assert ina3221.open_sensor(grow(tmp_path, files))(None).watts == {"VDD_IN": pytest.approx(0.5)}


def test_a_label_counts_whatever_the_number_of_chip_and_channel(tmp_path) -> None:
    other = CHIP.replace("hwmon7", "hwmon0").replace("0040", "0041")
    files = chip(**rail(3, "VDD_IN", 5000, 1000)) | chip(other, **rail(2, "VDD_CPU", 1000, 300))
    assert ina3221.open_sensor(grow(tmp_path, files))(None).watts == {
        "VDD_IN": pytest.approx(5.0),
        "VDD_CPU": pytest.approx(0.3),
    }


def test_only_the_rails_asked_for_are_read(tmp_path) -> None:
    """A rail whose file would block the answer costs nothing when the total does without it."""
    root = grow(tmp_path, chip(**rail(1, "VDD_IN", 5000, 100), **rail(2, "VDD_SOC", 5000, 10)))
    ask = ina3221.open_sensor(root)
    (root / CHIP / "curr2_input").unlink()
    assert (ask({"VDD_IN"}).watts, ask({"VDD_IN"}).lacks) == ({"VDD_IN": pytest.approx(0.5)}, {})
    assert ask(None).lacks["VDD_SOC"].lack == "not_present"


def test_a_channel_that_does_not_answer_or_says_nonsense_is_an_absence(tmp_path) -> None:
    root = grow(
        tmp_path,
        chip(**rail(1, "VDD_IN", 5000, 100), **rail(2, "VDD_SOC", 5000, 10), **rail(3, "VDD_CPU", 5000, 20)),
    )
    (root / CHIP / "curr3_input").write_text("N/A\n")
    with busy(root / CHIP / "in2_input"):
        rails = ina3221.open_sensor(root)(None)
    assert rails.watts == {"VDD_IN": pytest.approx(0.5)}
    assert {label: lack.lack for label, lack in rails.lacks.items()} == {"VDD_SOC": "busy", "VDD_CPU": "invalid"}


def test_two_rails_of_one_name_are_nobodys_figure(tmp_path) -> None:
    """A carrier board may have a chip of its own: neither rail is taken for the other, or added to it."""
    other = CHIP.replace("hwmon7", "hwmon8").replace("0040", "0042")
    files = chip(**rail(1, "VDD_IN", 5000, 100)) | chip(other, **rail(1, "VDD_IN", 5000, 900))
    rails = ina3221.open_sensor(grow(tmp_path, files))(None)
    assert (rails.watts, rails.lacks["VDD_IN"].lack) == ({}, "invalid")


def test_the_older_driver_may_put_units_behind_figures(tmp_path) -> None:
    folder = "sys/bus/i2c/drivers/ina3221x/6-0040/iio_device"
    root = grow(tmp_path, {f"{folder}/rail_name_0": "POM_5V_IN", f"{folder}/in_power0_input": "2040 mw"})
    assert ina3221.open_sensor(root)(None).watts == {"POM_5V_IN": pytest.approx(2.04)}


def test_channels_of_a_module_without_labels_are_numbered(tmp_path) -> None:
    """The driver has no label file where no device tree names it, and refuses a channel that is disabled."""
    files = chip(in1_input=5100, curr1_input=800, in2_input=3300, curr2_input=-200)
    root = grow(tmp_path, files | {f"{CHIP}/in3_input": "#lack invalid", f"{CHIP}/curr3_input": "#lack invalid"})
    rails = ina3221.open_sensor(root)(None)
    assert rails.watts == {"ina3221-1": pytest.approx(4.08), "ina3221-2": pytest.approx(-0.66)}
    assert rails.lacks == {}


def test_a_board_without_the_chip_says_so(tmp_path) -> None:
    with pytest.raises(NoData) as caught:
        ina3221.open_sensor(grow(tmp_path, {"sys/class/hwmon/hwmon0/name": "pwmfan"}))
    assert caught.value.lack == "not_present"
