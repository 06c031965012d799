"""What of an assignment's values means the same for every algorithm, read in one place."""

from __future__ import annotations

import pytest

from shared.protocol.messages import AllocatedValues, Assignment, Hyper


def test_values_are_read_by_type_and_stay_as_they_are_on_the_wire():
    """Whole numbers as well; what an algorithm adds of its own is no concern of this."""
    values = {"keep": 1, "prune": 0.25, "share": 0.5, "sent": 0.1}
    values |= {"up_bits_per_s": 8e3, "local_steps": 7, "chain": "0 1"}
    told = Assignment(seed=1, hyper=Hyper(), values=dict(values))
    assert told.allocation == AllocatedValues(
        keep=1.0, prune=0.25, sent=0.1, share=0.5, up_bits_per_s=8e3, local_steps=7
    )
    assert told.values == values


@pytest.mark.parametrize("bad", ["0.5", [0.5]])
def test_what_is_no_number_says_nothing(bad):
    """A server of another version may say what this one does not understand."""
    names = ("keep", "prune", "sent", "share", "up_bits_per_s", "local_steps")
    assert AllocatedValues.of(dict.fromkeys(names, bad)) == AllocatedValues()
    assert AllocatedValues.of({"local_steps": 1.5}) == AllocatedValues()


def test_steps_say_that_training_is_split():
    assert Assignment(seed=1, hyper=Hyper(), steps=3).is_split
    assert not Assignment(seed=1, hyper=Hyper(), values={"local_steps": 3}).is_split
