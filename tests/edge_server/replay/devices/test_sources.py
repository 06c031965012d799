"""Figures that are stated, drawn or computed, against hand-sized numbers and those of the papers."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import GivenLink, RangeLink, WirelessLink
from edge_server.plan.simulated_devices import (
    Cycles,
    CyclesPower,
    GivenCompute,
    GivenPower,
    ProfileCompute,
    ProfilePower,
    RangeCompute,
)
from edge_server.replay.devices.behaviour import Behaviour, Work
from edge_server.replay.devices.build import build_behaviour
from edge_server.replay.devices.curve import constant
from edge_server.replay.devices.random_draws import Blocks
from edge_server.replay.devices.ranges import count_cycles
from shared.errors import ConfigError
from tests.naming import naming

WORK = Work(steps=10, examples=320, weights=1000, flops=10**9, run="r", round=1, train=True)


def of(name: str = "a", seed: int = 0, **tables: object) -> Behaviour:
    """Return the behaviour of one device."""
    return build_behaviour(DevicePlan(name=name, **tables), 0, seed)


def work(**other: object) -> Work:
    """Return the same work, but for something."""
    return Work(**{**WORK.__dict__, **other})


def test_a_plan_without_tables_means_what_it_always_did():
    """So many seconds, two fixed rates, and nothing that anybody knows of joules."""
    plain = of(compute_s=2.5, up_mbit_s=3.0, delay_s=0.1)
    effort = plain.compute(WORK, 7.0)
    assert (effort.seconds, effort.joules, effort.cycles, effort.provenance) == (2.5, None, None, {})
    assert (plain.up, plain.down, plain.delay_s, plain.provenance) == (constant(3e6), None, 0.1, {})
    assert plain.radio("up", 0.0, 1.0) is None


def test_given_watts_are_charged_for_given_seconds():
    """4 s at 3 W are 12 J; 2 s of sending at 1.5 W are 3 J; what receiving takes nobody says."""
    device = of(
        compute=GivenCompute(seconds=4.0),
        link=GivenLink(up_mbit_s=1.0, loss=0.1),
        power=GivenPower(busy_w=3.0, idle_w=1.0, tx_w=1.5),
    )
    effort = device.compute(WORK, 0.0)
    assert (effort.seconds, effort.joules, effort.idle_w, device.loss) == (4.0, 12.0, 1.0, 0.1)
    assert (device.radio("up", 1.0, 3.0), device.radio("down", 1.0, 3.0)) == (3.0, None)
    assert {name: one.quality for name, one in effort.provenance.items()} == {
        "compute_s": "modelled",
        "compute_joules": "modelled",
    }


@pytest.mark.parametrize(
    ("by", "cycles"),
    [
        ({"cycles_per_step": 1e9}, 1e10),
        ({"cycles_per_example": 1e8}, 3.2e10),
        ({"cycles_per_weight": 1e6}, 1e10),
        ({"cycles_per_flop": 2.0}, 2e9),
    ],
)
def test_seconds_are_cycles_over_the_clock_and_joules_kappa_c_f_squared(by, cycles):
    """At 2 GHz, with kappa = 1e-28."""
    effort = of(compute=RangeCompute(hertz=2e9, **by), power=CyclesPower(kappa=1e-28)).compute(WORK, 3.0)
    assert (effort.seconds, effort.cycles) == (cycles / 2e9, cycles)
    assert effort.joules == pytest.approx(1e-28 * cycles * 4e18)


def test_an_evaluation_goes_through_the_network_but_not_back():
    """30 of its examples are as much as 10 that train; flops were counted one way, and steps it has none."""
    evaluation = work(train=False, steps=0, examples=30, flops=500)
    for by, seconds in (("example", 10.0), ("flop", 500.0), ("step", 0.0), ("weight", 0.0)):
        device = of(compute=RangeCompute(hertz=1e9, **{f"cycles_per_{by}": 1e9}))
        assert device.compute(evaluation, 0.0).seconds == pytest.approx(seconds)


def test_hcef_s_settings_give_hcef_s_figures():
    """f uniform in 1 to 2 GHz: mu is 75 to 150 s an iteration, as 1/f, and alpha 1.5 to 6 J, as f^2.

    C = 75 s * 2 GHz = 1.5e11 cycles; kappa = 1.5 J / (C * (1 GHz)^2) = 1e-29.
    """
    table, power = RangeCompute(hertz=(1e9, 2e9), cycles_per_step=1.5e11), CyclesPower(kappa=1e-29, tx_w=(0.1, 1.0))
    fleet = [of(name, compute=table, power=power) for name in map(str, range(400))]
    efforts = [device.compute(work(steps=1), 0.0) for device in fleet]
    seconds, joules = [one.seconds for one in efforts], [one.joules for one in efforts]
    assert (min(seconds), max(seconds)) == (pytest.approx(75, rel=0.01), pytest.approx(150, rel=0.01))
    assert (min(joules), max(joules)) == (pytest.approx(1.5, rel=0.02), pytest.approx(6.0, rel=0.02))
    assert statistics.mean(1.5e11 / one for one in seconds) == pytest.approx(1.5e9, rel=0.02)
    watts = [device.radio("up", 0.0, 1.0) for device in fleet]
    assert (min(watts), max(watts)) == (pytest.approx(0.1, abs=0.01), pytest.approx(1.0, abs=0.02))


def test_a_draw_is_a_function_of_seed_and_device():
    """Neither of the fleet nor of the order; with `round` also of the round, and only then."""
    table = RangeCompute(hertz=(1e9, 2e9), cycles_per_step=1e9)
    seconds = [
        of(name, seed, compute=table).compute(WORK, 0.0).seconds for name, seed in (("a", 0), ("b", 0), ("a", 1))
    ]
    assert len(set(seconds)) == 3
    assert of(compute=table).compute(work(round=9), 5.0).seconds == seconds[0]
    by_round = of(compute=RangeCompute(hertz=(1e9, 2e9), cycles_per_step=1e9, again="round"))
    assert len({by_round.compute(work(round=n), 0.0).seconds for n in range(9)}) == 9


def test_a_clock_that_changes_is_integrated():
    """10 s of work at 1 GHz, a new clock every 3 s: the cycles of the blocks it ran through add up to its own."""
    device = of(compute=RangeCompute(hertz=(1e9, 2e9), cycles_per_step=1e9, again=3.0))
    blocks = Blocks(lambda block: device.compute(work(steps=1), 3.0 * block).seconds ** -1 * 1e9, 3.0)
    effort = device.compute(WORK, 1.0)
    assert blocks.integral(1.0, 1.0 + effort.seconds) == pytest.approx(1e10)


@given(st.integers(1, 10**8), st.floats(0, 1e5), st.floats(0.01, 60))
def test_blocks_are_a_curve(amount, t0, every_s):
    """When is the inverse of the integral, also where blocks are drawn while it is asked."""
    blocks = Blocks(lambda block: 1e6 * (1 + block % 7), every_s)
    assert blocks.integral(t0, blocks.finish_time(t0, amount)) == pytest.approx(
        amount, rel=1e-6, abs=1e6 * 1e-10 * t0 + 1e-3
    )


def test_a_link_may_be_drawn_once_by_the_round_or_by_the_second():
    spans = {"up_mbit_s": (1.0, 5.0), "down_mbit_s": 9.0}
    once, by_round = of(link=RangeLink(**spans)), of(link=RangeLink(**spans, again="round"))
    assert once.of_round is None
    assert 1e6 <= once.up.at(0.0) == once.up.at(1e6) <= 5e6
    ups = {by_round.of_round(number)[0].at(0.0) for number in range(9)}
    assert len(ups) == 9
    assert by_round.of_round(3)[1] == constant(9e6)
    changing = of(link=RangeLink(**spans, again=2.0)).up
    assert len({changing.at(float(t)) for t in range(20)}) == 10
    assert all(1e6 <= changing.at(float(t)) <= 5e6 == changing.most for t in range(20))


def test_what_flows_all_the_while_flows_during_transfers_too():
    """Joules are the whole device's: 1 W idle and 0.1 W of radio are 11 J in 10 s, 1 J of them above idle."""
    power = CyclesPower(kappa=0.0, idle_w=1.0, tx_w=0.1, rx_w=0.5)
    device = of(compute=RangeCompute(hertz=1e9, cycles_per_step=1e9), power=power)
    assert device.compute(WORK, 0.0).joules == pytest.approx(10.0)
    assert (device.radio("up", 5.0, 15.0), device.radio("down", 0.0, 10.0)) == pytest.approx((11.0, 15.0))


@pytest.mark.parametrize("fading", ["none", "rayleigh"])
def test_a_cell_beyond_which_nothing_passes_is_refused_at_once(fading):
    """Its transfers would be summed over blocks of fading for ever, and a rate of 0 is no divisor."""
    with pytest.raises(ConfigError, match=naming("a", "link", "distance_m")):
        of(link=WirelessLink(bandwidth_hz=1e6, distance_m=1e7, fading=fading, again=0.5))


@pytest.mark.parametrize(("distance_m", "up", "down"), [(100.0, 65.6, 88.9), (200.0, 46.8, 70.1), (300.0, 35.9, 59.1)])
def test_shannon_s_rate_is_that_of_fedsl_s_settings(distance_m, up, down):
    """5 MHz, 23 and 37 dBm, -174 dBm/Hz, 128.1 + 37.6 log10(d) dB: in Mbit/s, worked out beside the paper."""
    device = of(link=WirelessLink(bandwidth_hz=5e6, distance_m=distance_m))
    assert device.up.at(0.0) / 1e6 == pytest.approx(up, abs=0.05)
    assert device.down.at(0.0) / 1e6 == pytest.approx(down, abs=0.05)


@given(st.floats(10.0, 5e3), st.floats(1.01, 5.0))
def test_a_rate_falls_with_the_distance_and_is_no_rate_of_kilometres(distance_m, farther):
    """Ten times as far is 37.6 dB less. The number of metres taken for kilometres would leave 0.34 bit/s at 200."""
    near, far = (of(link=WirelessLink(bandwidth_hz=5e6, distance_m=one)) for one in (distance_m, farther * distance_m))
    assert 1.0 < far.up.at(0.0) < near.up.at(0.0)
    assert far.down.at(0.0) < near.down.at(0.0)
    assert near.up.at(0.0) < near.down.at(0.0)


def test_shannon_s_rate_of_pruned_personalization():
    """A tenth of 20 MHz, 28 dBm over a noise of -110 dBm and a gain of 1e-10: 2 MHz * log2(1 + 6310) = 25.2 Mbit/s."""
    table = WirelessLink(bandwidth_hz=20e6, share=0.1, path_loss="none", gain=1e-10, tx_dbm=28.0, noise_w=1e-14)
    assert of(link=table).up.at(0.0) == pytest.approx(2e6 * math.log2(1 + 1e-10 * 0.63096 / 1e-14), rel=1e-4)


def test_a_path_may_follow_another_exponent():
    """40 dB at 1 m and 3.5 a decade: 110 dB at 100 m."""
    table = WirelessLink(bandwidth_hz=1e6, distance_m=100.0, path_loss="exponent", exponent=3.5, noise_w=1e-14)
    assert of(link=table).up.at(0.0) == pytest.approx(1e6 * math.log2(1 + 1e-11 * 0.19953 / 1e-14), rel=1e-4)


def test_rayleigh_s_gain_is_exponential_and_the_radio_pays_for_its_power():
    """HCEF: rate B log2(1 + g p / N) with g ~ Exp(1), N = 0.01 W. Its mean over p = 1 W is what quadrature gives."""
    table = WirelessLink(bandwidth_hz=1.0, path_loss="none", noise_w=0.01, tx_dbm=30.0, fading="rayleigh", again=1.0)
    device = of(link=table, compute=RangeCompute(hertz=1e9, cycles_per_step=1.0), power=CyclesPower(kappa=0.0))
    mean = sum(math.log2(1 + 100 * g) * math.exp(-g) * 1e-3 for g in (1e-3 * (k + 0.5) for k in range(30_000)))
    assert device.up.integral(0.0, 4000.0) / 4000 == pytest.approx(mean, rel=0.02)
    assert device.up.at(0.5) != device.up.at(1.5)
    assert device.radio("up", 2.0, 5.0) == pytest.approx(3.0)


def test_fading_is_drawn_once_by_the_round_or_by_the_second():
    """Place and bandwidth stay, and one gain holds for both ways."""
    keys = {"bandwidth_hz": (1e6, 5e6), "distance_m": (100.0, 300.0), "fading": "rayleigh"}
    once, by_round = of(link=WirelessLink(**keys)), of(link=WirelessLink(**keys, again="round"))
    assert once.of_round is None
    assert once.up.at(0.0) == once.up.at(9e9)
    rates = [by_round.of_round(number) for number in range(9)]
    assert len({up.at(0.0) for up, _ in rates}) == 9
    assert sorted(rates, key=lambda ways: ways[0].at(0.0)) == sorted(rates, key=lambda ways: ways[1].at(0.0))


def test_a_board_s_profile_gives_clock_and_watts():
    """A Pi 3 B+: 1.4 GHz, 1.9 W idle, 0.57 nJ a cycle: four cores take 1.9 + 4 * 0.798 W; its radio 0.6 W more."""
    compute = ProfileCompute(board="raspberry-pi-3b-plus", cycles_per_step=5.6e9, cores=4.0)
    device = of(compute=compute, power=ProfilePower(board="raspberry-pi-3b-plus"))
    effort = device.compute(WORK, 0.0)
    assert effort.seconds == pytest.approx(10.0)
    assert effort.joules == pytest.approx(10 * (1.9 + 4 * 0.57e-9 * 1.4e9))
    assert (effort.idle_w, device.radio("up", 0.0, 2.0)) == (1.9, pytest.approx(2 * 2.5))
    half = ProfileCompute(board="raspberry-pi-3b-plus", cycles_per_step=5.6e9, cores=4.0, hertz=0.7e9)
    assert of(compute=half).compute(WORK, 0.0).seconds == pytest.approx(20.0)


def test_a_replay_does_not_depend_on_this_machine_s_board():
    with pytest.raises(ConfigError, match=naming("a", "board", "auto")):
        of(compute=ProfileCompute(board="auto", cycles_per_step=1.0))
    with pytest.raises(ConfigError, match=naming("a", "apple")):
        of(compute=ProfileCompute(board="apple", cycles_per_step=1.0))


def test_cycles_of_a_step_are_those_of_the_share_that_is_computed():
    """Whatever they are counted by; operations are counted with the share already."""
    for table in (Cycles(cycles_per_step=3.0), Cycles(cycles_per_weight=3.0), Cycles(cycles_per_example=3.0)):
        assert count_cycles(table, work(share=0.25)) == 0.25 * count_cycles(table, work())
        assert count_cycles(table, work(share=0.25, train=False)) == count_cycles(table, work(train=False))
    assert count_cycles(Cycles(cycles_per_flop=2.0), work(share=0.25)) == 2.0 * WORK.flops
