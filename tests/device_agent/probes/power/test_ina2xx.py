"""A power monitor that somebody added."""

from __future__ import annotations

import pytest

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


def test_a_chip_that_does_not_answer_is_an_absence(tmp_path) -> None:
    root = grow(tmp_path, {f"{HWMON}/hwmon1/name": "ina219"})
    with busy(root / HWMON / "hwmon1/power1_input"):
        assert ina2xx.open_sensor(root)(None).lacks["ina219"].lack == "busy"


def test_other_sensors_are_none_of_its_business(tmp_path) -> None:
    with pytest.raises(NoData):
        ina2xx.open_sensor(grow(tmp_path, {f"{HWMON}/hwmon0/name": "ina3221", f"{HWMON}/hwmon0/power1_input": 5}))
