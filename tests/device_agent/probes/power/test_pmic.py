"""The power chip of a Raspberry Pi 5, from the words of its firmware."""

from __future__ import annotations

import pytest

from device_agent.probes.power import pmic
from device_agent.probes.power.rails import choose_summands, correct_watts, sum_rails
from device_agent.profile.schema import Power
from shared.errors import NoData
from tests.machine import grow, shared

PAIR = " VDD_CORE_A current(7)=2.00000000A\n VDD_CORE_V volt(15)=0.85000000V\n"


def answer(name: str, amperes: float, volts: float) -> str:
    return f" {name}_A current(1)={amperes:.8f}A\n {name}_V volt(30)={volts:.8f}V\n"


def test_a_busy_board_draws_what_was_worked_out_by_hand() -> None:
    """7.24 W over twelve rails; CPU 5.36 W, memory 0.29 W; 1.1451 * 7.24 + 0.5879 = 8.88 W at the 5 V input."""
    text = shared("reference", "boards", "rpi-5", "pmic_read_adc_4cores_busy.txt").read_text()
    power, rails = Power(gain=1.1451, offset_w=0.5879), pmic.parse_rails(text)
    labels = choose_summands(power, rails, by_profile=True)
    assert len(rails.watts) == 12
    assert rails.watts.keys().isdisjoint({"EXT5V", "BATT"})
    assert rails.watts["VDD_CORE"] == pytest.approx(5.36, abs=0.005)
    assert rails.watts["DDR_VDD2"] + rails.watts["DDR_VDDQ"] == pytest.approx(0.29, abs=0.005)
    total = sum_rails(labels, rails)
    assert total == pytest.approx(7.24, abs=0.005)
    assert correct_watts(total, power) == pytest.approx(8.88, abs=0.005)


def test_currents_without_voltages_are_no_power() -> None:
    text = shared("reference", "boards", "rpi-5", "pmic_read_adc_early_firmware_head.txt").read_text()
    with pytest.raises(NoData) as caught:
        pmic.parse_rails(text)
    assert caught.value.lack == "invalid"


def test_rails_are_paired_by_name_and_those_without_a_partner_left_out() -> None:
    rails = pmic.parse_rails(PAIR + " EXT5V_V volt(24)=5.09066000V\n HDMI_A current(22)=0.02000000A\n")
    assert rails.watts == {"VDD_CORE": pytest.approx(1.7)}


@pytest.mark.parametrize(("amperes", "kept"), [(0.00006, True), (0.1, True), (0.6105, False)])
def test_a_channel_that_old_firmware_gets_wrong_is_ignored(amperes, kept) -> None:
    """3V3_DAC carries microamperes: 0.61 A of it would be 2 W that nobody draws."""
    rails = pmic.parse_rails(PAIR + answer("3V3_DAC", amperes, 3.3))
    assert ("3V3_DAC" in rails.watts) == kept
    assert ("3V3_DAC" in rails.lacks) != kept
    assert sum_rails(rails.total_labels, rails) == pytest.approx(1.7 + 3.3 * amperes * kept)


def test_old_firmwares_name_of_a_rail_is_todays() -> None:
    """So that one profile knows all rails of both."""
    assert pmic.parse_rails(answer("0V8_SYS", 0.5, 0.8)).watts == {"0V8_SW": pytest.approx(0.4)}


@pytest.mark.parametrize("text", ["", "error=2", "VDD_CORE_A current(7)=A", "X_A current(7)=1.0V\nX_V volt(8)=1.0A"])
def test_what_is_no_answer_is_invalid(text) -> None:
    with pytest.raises(NoData) as caught:
        pmic.parse_rails(text)
    assert caught.value.lack == "invalid"


def test_the_firmware_is_asked_anew_at_every_read(tmp_path) -> None:
    name = "tools/vcgencmd pmic_read_adc"
    ask = pmic.open_sensor(grow(tmp_path, {name: answer("VDD_CORE", 1.0, 0.8)}))
    assert ask(None).watts == {"VDD_CORE": pytest.approx(0.8)}
    grow(tmp_path, {name: answer("VDD_CORE", 2.0, 0.8)})
    assert ask(None).watts == {"VDD_CORE": pytest.approx(1.6)}


def test_another_board_has_no_such_firmware(tmp_path) -> None:
    with pytest.raises(NoData) as caught:
        pmic.open_sensor(tmp_path)(None)
    assert caught.value.lack == "not_present"
