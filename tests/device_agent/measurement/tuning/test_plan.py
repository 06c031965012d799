"""Steps between two board settings: minimal, in a valid order, reversible."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.measurement.tuning.plan import (
    CPUFREQ_FOLDER,
    PolicyClocks,
    Run,
    Settings,
    Target,
    Write,
    plan_restore,
    plan_steps,
)
from shared.errors import ConfigError
from tests.naming import naming

MHZ = (600, 900, 1200, 1500)
GOVERNORS = ("ondemand", "performance", "powersave")
MODES = {"15W": 0, "25W": 1, "7W": 2}


def clocks(least: int = 600, most: int = 1500, governor: str = "ondemand", **more) -> PolicyClocks:
    return PolicyClocks(
        governor=governor,
        min_hertz=least * 1_000_000,
        max_hertz=most * 1_000_000,
        lowest_hertz=MHZ[0] * 1_000_000,
        highest_hertz=MHZ[-1] * 1_000_000,
        **{"available_hertz": tuple(one * 1_000_000 for one in MHZ), "governors": GOVERNORS} | more,
    )


def board(mode: str = "15W", **policies: PolicyClocks) -> Settings:
    return Settings(
        policies=policies or {"policy0": clocks()}, power_mode=mode, power_modes=MODES, needs_reboot=("7W",)
    )


def write(name: str, value: object, policy: str = "policy0") -> Write:
    return Write(path=f"{CPUFREQ_FOLDER}/{policy}/scaling_{name}", value=str(value))


def test_a_cap_is_rounded_down_to_a_clock_there_is():
    """1300 MHz is none of 600, 900, 1200 and 1500: 1200 is the highest that is not above; the file is in kHz."""
    assert plan_steps(board(), Target(max_hertz=1.3e9)) == (write("max_freq", 1_200_000),)
    assert plan_steps(board(), Target(max_hertz=9e9)) == ()


def test_without_a_list_of_clocks_the_cap_is_taken_as_it_is():
    """As intel_pstate has it; never above what the hardware can do."""
    free = board(policy0=clocks(available_hertz=()))
    assert plan_steps(free, Target(max_hertz=1.3e9)) == (write("max_freq", 1_300_000),)
    assert plan_steps(free, Target(max_hertz=float("inf"))) == ()


def test_a_cap_below_the_least_clock_lowers_that_first():
    """The kernel takes no highest clock below the lowest; on the way back the highest goes up first."""
    before = board(policy0=clocks(least=1200, most=1500))
    target = Target(max_hertz=0.9e9)
    assert plan_steps(before, target) == (write("min_freq", 900_000), write("max_freq", 900_000))
    after = board(policy0=clocks(least=900, most=900))
    assert plan_restore(after, before, target) == (write("max_freq", 1_500_000), write("min_freq", 1_200_000))


def test_each_policy_gets_what_it_lacks():
    two = board(policy0=clocks(), policy4=clocks(governor="powersave"))
    assert plan_steps(two, Target(governor="powersave")) == (write("governor", "powersave"),)


def test_a_power_mode_comes_alone_by_its_number():
    """It sets clocks of its own, so that they are planned from what it leaves."""
    target = Target(power_mode="25W", max_hertz=0.9e9)
    assert plan_steps(board(), target) == (Run(command=("nvpmodel", "-m", "1"), power_mode="25W"),)
    assert plan_steps(board("25W"), target) == (write("max_freq", 900_000),)


@pytest.mark.parametrize(
    ("current", "target", "said"),
    [
        (board(), Target(power_mode="40W"), ["'40W'", "15W, 25W, 7W"]),
        (board(), Target(power_mode="7W"), ["7W", "15W", "`nvpmodel -m 2`"]),
        (board("7W"), Target(power_mode="15W"), ["15W", "7W", "`nvpmodel -m 0`"]),
        (board(""), Target(power_mode="15W"), ["15W"]),
        (Settings(), Target(power_mode="15W"), ["'15W'"]),
        (board(), Target(governor="turbo"), ["'turbo'", "policy0", "ondemand, performance"]),
        (board(), Target(max_hertz=1e8), ["policy0", "100 MHz", "600 MHz"]),
        (board(), Target(max_hertz=float("nan")), ["policy0", "nan MHz"]),
        (Settings(), Target(max_hertz=1e9), ["cpufreq"]),
    ],
)
def test_what_the_board_cannot_do_is_refused_with_what_it_can(current, target, said):
    with pytest.raises(ConfigError, match=naming(*said)):
        plan_steps(current, target)


def obeyed(settings: Settings, steps: tuple) -> Settings:
    """Return the settings after steps, as a kernel has it that refuses a highest clock below the lowest."""
    for step in steps:
        if isinstance(step, Run):
            number = int(step.command[2])
            settings = msgspec.structs.replace(settings, power_mode={n: name for name, n in MODES.items()}[number])
            continue
        folder, _, file = step.path.rpartition("/")
        policy = folder.removeprefix(f"{CPUFREQ_FOLDER}/")
        field = {"scaling_governor": "governor", "scaling_min_freq": "min_hertz", "scaling_max_freq": "max_hertz"}[file]
        value = step.value if field == "governor" else int(step.value) * 1000
        changed = msgspec.structs.replace(settings.policies[policy], **{field: value})
        assert changed.min_hertz <= changed.max_hertz, step
        settings = msgspec.structs.replace(settings, policies=settings.policies | {policy: changed})
    return settings


ranges = st.lists(st.sampled_from(MHZ), min_size=2, max_size=2).map(sorted)
policies = st.builds(lambda ends, governor: clocks(*ends, governor=governor), ranges, st.sampled_from(GOVERNORS))
boards = st.builds(
    lambda one, two, mode: board(mode, policy0=one, policy4=two), policies, policies, st.sampled_from(("15W", "25W"))
)
targets = st.builds(
    Target,
    power_mode=st.sampled_from(("", "15W", "25W")),
    governor=st.sampled_from(("", *GOVERNORS)),
    max_hertz=st.sampled_from((0.0, 0.6e9, 0.95e9, 1.2e9, 5e9)),
)


@given(boards, targets)
def test_two_plans_reach_the_target_and_a_third_has_nothing_to_do(before, target):
    """Each step is one the kernel takes; no clock is above the cap, and nothing else changed."""
    after = obeyed(before, plan_steps(before, target))
    after = obeyed(after, plan_steps(after, target))
    assert plan_steps(after, target) == ()
    for name, one in after.policies.items():
        assert not target.max_hertz or one.max_hertz <= target.max_hertz
        assert target.max_hertz or (one.min_hertz, one.max_hertz) == (
            before.policies[name].min_hertz,
            before.policies[name].max_hertz,
        )
        assert one.governor == (target.governor or before.policies[name].governor)


@given(boards, targets)
def test_the_way_back_ends_where_it_began(before, target):
    after = obeyed(before, plan_steps(before, target))
    after = obeyed(after, plan_steps(after, target))
    restored = obeyed(after, plan_restore(after, before, target))
    restored = obeyed(restored, plan_restore(restored, before, target))
    assert restored == before


@given(boards)
def test_nothing_wanted_is_nothing_done(before):
    assert plan_steps(before, Target()) == ()
    assert plan_restore(before, before, Target(power_mode="15W", governor="powersave", max_hertz=1e9)) == ()


def test_the_way_back_leaves_alone_what_was_not_ours():
    """An operator who sets another governor meanwhile keeps it, where we only capped the clock."""
    before, now = board(), board(policy0=clocks(most=900, governor="performance"))
    assert plan_restore(now, before, Target(max_hertz=0.9e9)) == (write("max_freq", 1_500_000),)


def test_a_policy_that_is_gone_is_passed_over():
    """Its CPUs were switched off meanwhile."""
    before = board(policy0=clocks(), policy4=clocks())
    assert plan_restore(board(policy0=clocks(most=900)), before, Target(max_hertz=0.9e9)) == (
        write("max_freq", 1_500_000),
    )
