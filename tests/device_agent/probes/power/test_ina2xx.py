"""A power monitor that somebody added."""

from __future__ import annotations

import pytest

from device_agent.commands.diagnosis import record_board
from device_agent.probes.power import ina2xx
from device_agent.probes.power.rails import choose_summands
from device_agent.profile.schema import Power
from shared.errors import NoData
from tests.machine import busy, grow

HWMON = "sys/class/hwmon"


@pytest.mark.parametrize("name", ["ina219", "ina226", "ina238", "ina260"])
def test_a_chip_alone_is_the_total(name, tmp_path) -> None:
    """Microwatts, whatever other sensors there are; the device number means nothing."""
    files = {f"{HWMON}/hwmon5/name": name, f"{HWMON}/hwmon5/power1_input": 2_740_000, f"{HWMON}/hwmon0/name": "pwmfan"}
    rails = ina2xx.open_sensor(grow(tmp_path, files))(None)
    assert rails.watts == {name: pytest.approx(2.74)}
    assert choose_summands(Power(), rails, by_profile=False) == (name,)


def test_the_device_trees_label_goes_before_the_chips_name(tmp_path) -> None:
    files = {
        f"{HWMON}/hwmon1/name": "ina238",
        f"{HWMON}/hwmon1/label": "VIN",
        f"{HWMON}/hwmon1/power1_input": 9_000_000,
    }
    assert ina2xx.open_sensor(grow(tmp_path, files))(None).watts == {"VIN": pytest.approx(9.0)}


def test_two_chips_are_told_apart_by_address_and_make_no_total_by_themselves(tmp_path) -> None:
    """One of them may feed the other: only a profile that names them can know."""
    for number, address in enumerate(("1-0040", "1-0045")):
        device = f"sys/devices/i2c-1/{address}/hwmon/hwmon{number}"
        grow(tmp_path, {f"{device}/name": "ina219", f"{device}/power1_input": 1_000_000 * (number + 1)})
        (tmp_path / HWMON).mkdir(parents=True, exist_ok=True)
        (tmp_path / HWMON / f"hwmon{number}").symlink_to(tmp_path / device)
    rails = ina2xx.open_sensor(tmp_path)(None)
    assert rails.watts == {"ina219-1-0040": pytest.approx(1.0), "ina219-1-0045": pytest.approx(2.0)}
    with pytest.raises(NoData):
        choose_summands(Power(), rails, by_profile=False)
    assert choose_summands(Power(total=("ina219-1-0045",)), rails, by_profile=False) == ("ina219-1-0045",)


def test_two_chips_have_one_name_live_and_recorded(tmp_path) -> None:
    """As a kernel shows them: the class and the bus lead to the device by links, of which a copy has none."""
    board = tmp_path / "board"
    for number, address in ((4, "1-0045"), (2, "1-0040")):
        device = f"sys/devices/platform/soc/i2c-1/{address}/hwmon/hwmon{number}"
        grow(board, {f"{device}/name": "ina219", f"{device}/power1_input": 1_000_000 * number})
        for link, target in (
            (f"{HWMON}/hwmon{number}", device),
            (f"sys/bus/i2c/devices/{address}", f"sys/devices/platform/soc/i2c-1/{address}"),
        ):
            (board / link).parent.mkdir(parents=True, exist_ok=True)
            (board / link).symlink_to(board / target)
    record_board.record(board, tmp_path / "copy")
    live, copy = (ina2xx.open_sensor(root)(None) for root in (board, tmp_path / "copy/root"))
    assert live.watts == copy.watts == {"ina219-1-0040": pytest.approx(2.0), "ina219-1-0045": pytest.approx(4.0)}


def test_a_chip_that_does_not_answer_is_an_absence(tmp_path) -> None:
    root = grow(tmp_path, {f"{HWMON}/hwmon1/name": "ina219"})
    with busy(root / HWMON / "hwmon1/power1_input"):
        assert ina2xx.open_sensor(root)(None).lacks["ina219"].lack == "busy"


def test_other_sensors_are_none_of_its_business(tmp_path) -> None:
    with pytest.raises(NoData):
        ina2xx.open_sensor(grow(tmp_path, {f"{HWMON}/hwmon0/name": "ina3221", f"{HWMON}/hwmon0/power1_input": 5}))
