"""Which rails make a total, and that nothing is ever counted twice or left out in silence."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes.power.rails import (
    Rails,
    choose_summands,
    correct_watts,
    find_double_count,
    sum_rails,
    validate_watts,
)
from device_agent.profile.schema import Power, Rail
from shared.errors import NoData
from shared.protocol.measurements import Absent
from tests.naming import naming

LABELS = tuple("ABCDEFGH")
ANY_RAILS = st.dictionaries(st.sampled_from(LABELS), st.sampled_from(("", *LABELS)), min_size=1)
"""Labels with the one that contains each; loops and parents that no sensor shows are among them."""


def ancestors(label: str, parents: dict[str, str]) -> set[str]:
    found: set[str] = set()
    while (label := parents.get(label, "")) and label not in found:
        found.add(label)
    return found


@given(parents=ANY_RAILS, total=st.lists(st.sampled_from(LABELS), max_size=5), by_profile=st.booleans())
def test_no_total_holds_a_rail_and_one_that_contains_it(parents, total, by_profile) -> None:
    """For any rails, any total of a profile nobody checked, and any kind of sensor."""
    power = Power(rails=tuple(Rail(label=one, child_of=parent) for one, parent in parents.items()), total=tuple(total))
    rails = Rails(watts=dict.fromkeys(parents, 1.0), total_labels=tuple(parents))
    with contextlib.suppress(NoData):
        labels = choose_summands(power, rails, by_profile=by_profile)
        assert len(set(labels)) == len(labels) > 0
        assert all(ancestors(label, parents).isdisjoint(set(labels) - {label}) for label in labels)


@given(parents=ANY_RAILS, labels=st.lists(st.sampled_from(LABELS), max_size=5))
def test_only_what_would_count_twice_is_refused(parents, labels) -> None:
    twice = find_double_count(labels, parents)
    repeated = len(set(labels)) < len(labels)
    nested = any(ancestors(label, parents) & (set(labels) - {label}) for label in labels)
    assert bool(twice) == (repeated or nested)


@given(watts=st.dictionaries(st.sampled_from(LABELS), st.floats(0, 100)), labels=st.sets(st.sampled_from(LABELS)))
def test_a_sum_is_whole_or_absent(watts, labels) -> None:
    """Never a smaller one because a rail did not answer; rails that are not asked for never count."""
    chosen = tuple(sorted(labels))
    if labels <= watts.keys():
        assert sum_rails(chosen, Rails(watts=watts)) == pytest.approx(sum(watts[label] for label in chosen))
    else:
        with pytest.raises(NoData, match="|".join(labels - watts.keys())) as caught:
            sum_rails(chosen, Rails(watts=watts))
        assert caught.value.lack == "not_present"


def test_a_rail_of_the_total_that_does_not_answer_gives_its_own_lack() -> None:
    rails = Rails(watts={"A": 1.0}, lacks={"B": Absent(lack="busy", cause="asleep")})
    with pytest.raises(NoData, match="asleep") as caught:
        sum_rails(("A", "B"), rails)
    assert caught.value.lack == "busy"


def test_a_meter_that_the_profile_does_not_name_is_the_total_by_itself() -> None:
    """And where it is named, or only the profile can know, the profile decides."""
    power, meter = Power(total=("VDD_IN",)), Rails(watts={"ina219": 3.0}, total_labels=("ina219",))
    assert choose_summands(power, meter, by_profile=False) == ("ina219",)
    assert choose_summands(power, meter, by_profile=True) == ("VDD_IN",)
    both = Rails(watts={"VDD_IN": 3.0, "FAN": 1.0}, total_labels=())
    assert choose_summands(power, both, by_profile=False) == ("VDD_IN",)
    with pytest.raises(NoData, match=naming("FAN", "VDD_IN")):
        choose_summands(Power(), both, by_profile=True)


@pytest.mark.parametrize("watts", [0.0, -1.0, 0.9, 10.1, float("nan"), float("inf")])
def test_a_total_out_of_bounds_is_invalid(watts) -> None:
    with pytest.raises(NoData) as caught:
        validate_watts(watts, (1.0, 10.0))
    assert caught.value.lack == "invalid"


def test_zero_is_no_power_whatever_the_bounds() -> None:
    with pytest.raises(NoData):
        validate_watts(0.0, (0.0, 10.0))


def test_the_correction_is_a_line() -> None:
    """Derivation: 2 * 3 W + 0.5 W."""
    assert correct_watts(3.0, Power(gain=2.0, offset_w=0.5)) == 6.5
