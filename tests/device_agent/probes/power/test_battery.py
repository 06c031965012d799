"""What a machine draws from its battery."""

from __future__ import annotations

import pytest

from device_agent.probes.power import battery
from device_agent.probes.power.rails import sum_rails
from shared.errors import NoData
from tests.boards import material
from tests.machine import grow, shared

SUPPLIES = "sys/class/power_supply"


def supply(name: str, **files: object) -> dict[str, object]:
    return {f"{SUPPLIES}/{name}/{file}": content for file, content in ({"type": "Battery"} | files).items()}


def total(root) -> float:
    rails = battery.open_sensor(root)(None)
    return sum_rails(rails.total_labels, rails)


def test_a_recorded_laptop_draws_five_watts(tmp_path) -> None:
    content = shared("reference", "boards", "x86-generic", "power_supply_bat0_tree.tsv").read_text()
    assert total(material.write(material.tsv(content), tmp_path)) == pytest.approx(5.002)


@pytest.mark.parametrize("current", [1_500_000, -1_500_000])
def test_without_a_power_it_is_current_times_voltage_whatever_the_sign(current, tmp_path) -> None:
    """Derivation: 1.5 A * 8 V."""
    files = supply("BAT0", status="Discharging", current_now=current, voltage_now=8_000_000)
    assert total(grow(tmp_path, files)) == pytest.approx(12.0)


def test_two_batteries_add_up_and_one_at_rest_adds_nothing(tmp_path) -> None:
    files = supply("BAT0", status="Discharging", power_now=3_000_000) | supply(
        "BAT1", status="Discharging", power_now=4_000_000
    )
    assert total(grow(tmp_path, files)) == pytest.approx(7.0)
    assert total(grow(tmp_path, {f"{SUPPLIES}/BAT1/status": "Not charging"})) == pytest.approx(3.0)


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging", "Unknown"])
def test_on_a_charger_the_battery_does_not_know_the_draw(status, tmp_path) -> None:
    ask = battery.open_sensor(grow(tmp_path, supply("BAT0", status=status, power_now=5_000_000)))
    with pytest.raises(NoData) as caught:
        ask(None)
    assert caught.value.lack == "busy"


def test_batteries_of_other_devices_and_chargers_are_none(tmp_path) -> None:
    mouse = supply("hidpp_battery_0", scope="Device", status="Discharging", power_now=1)
    with pytest.raises(NoData) as caught:
        battery.open_sensor(grow(tmp_path, mouse | supply("AC", type="Mains", online=1)))
    assert caught.value.lack == "not_present"


def test_a_discharging_battery_without_figures_is_an_absence(tmp_path) -> None:
    rails = battery.open_sensor(grow(tmp_path, supply("BAT0", status="Discharging", current_now=1)))(None)
    assert (rails.watts, rails.lacks["BAT0"].lack, rails.total_labels) == ({}, "not_present", ("BAT0",))
