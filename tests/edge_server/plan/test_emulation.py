"""Plan table `[emulation]`: limits that a local agent can and cannot emulate."""

from __future__ import annotations

import pytest

from edge_server.plan.devices import DevicePlan
from edge_server.plan.emulation import emulated_link, emulated_power
from edge_server.plan.links import GivenLink
from edge_server.plan.simulated_devices import CyclesPower, GivenPower, RangeCompute
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan
from tests.naming import naming

CLOCKS = "compute = { kind = 'ranges', hertz = [1e9, 2e9], cycles_per_step = 1e6 }"


def test_links_of_fixed_rates_are_taken_as_they_stand():
    assert emulated_link(DevicePlan(name="a")) == (None, None, 0.0)
    assert emulated_link(DevicePlan(name="a", up_mbit_s=2.0, delay_s=0.1)) == (2.0, None, 0.1)
    assert emulated_link(DevicePlan(name="a", link=GivenLink(up_mbit_s=2.0, down_mbit_s=9.0))) == (2.0, 9.0, 0.0)


def test_power_is_told_above_that_of_the_idle_board():
    """A busy core of kappa f^2 joules a cycle draws kappa f^3 watts; nothing is known of a radio that is not given."""
    assert emulated_power(DevicePlan(name="a")) is None
    given = DevicePlan(name="a", power=GivenPower(busy_w=5.0, idle_w=2.0, tx_w=3.0))
    assert emulated_power(given) == (2.0, 3.0, 1.0, None)
    cycles = DevicePlan(
        name="a",
        compute=RangeCompute(hertz=2e9, cycles_per_step=1e6),
        power=CyclesPower(kappa=1e-27, tx_w=0.5, rx_w=0.0),
    )
    assert emulated_power(cycles) == pytest.approx((0.0, 8.0, 0.5, 0.0))


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ('link = { kind = "ranges", up_mbit_s = [1.0, 2.0] }', "links"),
        ('link = { kind = "given", up_mbit_s = 1.0, loss = 0.1 }', "links"),
        (f"{CLOCKS}\npower = {{ kind = 'cycles', kappa = 1e-27 }}", "power"),
        ('power = { kind = "trace", path = "power.csv" }', "power"),
    ],
)
def test_what_no_agent_can_be_held_to_is_refused_where_that_is_asked_for(tmp_path, table, key):
    device = f'[[device]]\nname = "a"\n{table}\n[[device]]\nname = "b"'
    with pytest.raises(ConfigError, match=naming(f"emulation.{key}", "a")):
        load(write_plan(tmp_path, more=f"[emulation]\nlinks = true\npower = true\n{device}"), tmp_path)
    load(write_plan(tmp_path, more=f"[emulation]\n{device}"), tmp_path)
