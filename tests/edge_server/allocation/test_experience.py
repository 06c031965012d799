"""What a journal teaches: order, last good figures, rates, errors; the same however often it is read."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.allocation.experience import Experience
from edge_server.journal.decision import Decision, DeviceDecision, Figure
from edge_server.journal.records import AnyRecord, CostSettled, Measured, Rewound, RoundOpened, UpdateAccepted
from shared.protocol.measurements import Cost, StepCost
from shared.protocol.messages import Assignment, Hyper, Update

TOLD = Assignment(seed=0, hyper=Hyper())
STEP = StepCost(steps=3, seconds=0.5, weights=10, flops=7)


def opened(number: int, *devices: str, decision: Decision | None = None) -> RoundOpened:
    return RoundOpened(round=number, assignments=dict.fromkeys(devices, TOLD), decision=decision)


def decided(share: float = 0.5, **figures: float) -> Decision:
    given = DeviceDecision(
        values={"share": share, "up_bits_per_s": 5000.0},
        figures={name: Figure(value, "measured") for name, value in figures.items()},
        predicted=Cost(compute_s=2.0, upload_s=4.0),
    )
    return Decision(optimizer="bandwidth", devices={"a": given})


def came(number: int, device: str = "a", **cost: float) -> UpdateAccepted:
    update = Update(run="r", round=number, device=device, params=None, cost=Cost(**cost))
    return UpdateAccepted(round=number, device=device, update=update, bytes_up=1)


def settled(number: int, device: str = "a", **cost: float) -> CostSettled:
    return CostSettled(round=number, device=device, cost=Cost(**cost))


def learnt(*records: AnyRecord) -> Experience:
    experience = Experience()
    experience.take(records)
    return experience


def test_the_order_is_that_of_first_appearance_and_survives_rounds_that_are_done_again():
    found = learnt(opened(1, "b", "d"), Rewound(round=1, cause="lost"), opened(1, "a", "b"), opened(2, "c", "d"))
    assert found.order == ["b", "d", "a", "c"]


@pytest.mark.parametrize(
    ("size", "seconds", "rate"),
    [
        (10_000, 16.0, 10_000.0),  # at 5000 bit/s, as told: of the link it shows no more than was thought
        (10_000, 18.0, 10_000.0),  # a little later, for what goes beside: that is an error of the prediction
        (10_000, 32.0, 10_000.0),  # at half of what was told, once: that may be anything
        (10_000, 4.0, 20_000.0),  # at 20 kbit/s, beyond what was told: it had the whole link
        (10_000, 12.0, 10_000.0),  # a burst
        (100, 32.0, None),  # too small to tell
    ],
)
def test_a_rate_is_that_of_the_whole_link(size, seconds, rate):
    """Half of a link of 10 kbit/s was given."""
    found = learnt(opened(1, "a", decision=decided()), settled(1, upload_s=seconds, bytes_up=size))
    assert found.last_upload["a"].up_bits_per_s == (None if rate is None else pytest.approx(rate))


def test_a_link_that_fell_shows_in_the_second_round_and_a_guess_that_was_too_high_at_once():
    slow = [opened(1, "a", decision=decided(up_bits_per_s=10_000.0)), settled(1, upload_s=32.0, bytes_up=10_000)]
    again = [opened(2, "a", decision=decided(up_bits_per_s=10_000.0)), settled(2, upload_s=32.0, bytes_up=10_000)]
    assert learnt(*slow).last_upload["a"].up_bits_per_s == pytest.approx(10_000.0)
    assert learnt(*slow, *again).last_upload["a"].up_bits_per_s == pytest.approx(5_000.0)
    given = decided().devices["a"]
    guess = msgspec.structs.replace(given, figures={"up_bits_per_s": Figure(10_000.0, "profile")})
    found = learnt(opened(1, "a", decision=Decision(optimizer="bandwidth", devices={"a": guess})), slow[1])
    assert found.last_upload["a"].up_bits_per_s == pytest.approx(5_000.0)
    assert found.errors == {}


def test_a_rate_where_none_was_given():
    assert learnt(opened(1, "a"), settled(1, upload_s=4.0, bytes_up=10_000)).last_upload["a"].up_bits_per_s == 20_000.0
    assert learnt(opened(1, "a"), settled(1, upload_s=4.0, bytes_up=100)).last_upload["a"].up_bits_per_s is None
    assert learnt(opened(1, "a"), settled(1, upload_s=float("nan"), bytes_up=10**6)).last_upload == {}


@pytest.mark.parametrize(("seconds", "rate"), [(0.1, 8000.0), (4.0, None)])
def test_a_short_upload_tells_only_that_a_link_is_faster_than_was_thought(seconds, rate):
    """Else a device of which nothing is known, and that has little to send, would stay unknown."""
    guess = DeviceDecision(values={"share": 0.5}, figures={"up_bits_per_s": Figure(1000.0, "default")})
    decision = Decision(optimizer="bandwidth", devices={"a": guess})
    found = learnt(opened(1, "a", decision=decision), settled(1, upload_s=seconds, bytes_up=100))
    assert found.last_upload["a"].up_bits_per_s == (None if rate is None else pytest.approx(rate))


def test_a_rate_stays_known_while_the_next_upload_is_not_settled():
    """The cost of an upload comes with a later report, often after the next round has begun."""
    settles = settled(1, upload_s=4.0, bytes_up=10_000, compute_s=1.0)
    found = learnt(opened(1, "a"), opened(2, "a"), settles, came(2, compute_s=3.0))
    assert found.last_upload["a"].up_bits_per_s == 20_000.0
    assert found.tasks["a"].cost.compute_s == 3.0


def test_errors_are_measured_over_predicted_smoothed_and_clipped():
    """Computed in 3 s, not 2; sent in 40 s, not 4, of which a factor 4 is believed."""
    first = [opened(1, "a", decision=decided()), came(1, compute_s=3.0, download_s=1.0)]
    assert learnt(*first).errors["a"] == {"compute_error": 1.5}
    both = [*first, settled(1, compute_s=3.0, upload_s=40.0)]
    assert learnt(*both).errors["a"] == {"compute_error": 1.5, "upload_error": 4.0}
    corrected = decided(compute_error=1.5)
    again = [*both, opened(2, "a", decision=corrected), came(2, compute_s=2.0)]
    assert learnt(*again).errors["a"]["compute_error"] == pytest.approx(1.5)
    low = [*both, opened(2, "a", decision=corrected), came(2, compute_s=1.0)]
    assert learnt(*low).errors["a"]["compute_error"] == pytest.approx(0.5 * 1.5 + 0.5 * 0.75)


def test_what_a_measurement_and_an_evaluation_cost_tells_of_no_training():
    """They are no rounds that were opened."""
    found = learnt(settled(0, compute_s=9.0, upload_s=1.0), opened(1, "a"), settled(2, compute_s=9.0, upload_s=1.0))
    assert (found.tasks, found.last_upload) == ({}, {})


def test_what_is_learnt_does_not_depend_on_how_the_journal_is_read():
    records = [
        Measured(by_device={"a": STEP}),
        opened(1, "a", "b", decision=decided(step_s=0.5)),
        came(1, compute_s=3.0),
        came(1, "b", compute_s=7.0),
        settled(1, compute_s=3.0, upload_s=2.0, bytes_up=9000),
        opened(2, "a"),
    ]
    whole, parts = learnt(*records), Experience()
    for record in records:
        parts.take([record])
    assert whole == parts
    assert whole.steps == {"a": STEP}
    assert whole.last == {"a": {"step_s": Figure(0.5, "measured")}}
    assert whole.tasks["b"].cost.compute_s == 7.0


def predicting(compute: float, upload: float, source: str = "measured", **figures: float) -> Decision:
    """Return a decision that foresees so many joules, from such figures."""
    told = {name: Figure(value, "measured") for name, value in figures.items()}
    told |= {name: Figure(1.0, source) for name in ("task_joules", "upload_w")}
    predicted = Cost(compute_joules=compute, upload_joules=upload)
    return Decision(
        optimizer="keep_ratio", devices={"a": DeviceDecision(values={"keep": 0.4}, figures=told, predicted=predicted)}
    )


def test_an_error_of_joules_is_learnt_as_one_of_seconds_from_whole_tasks_that_were_like_the_one_before():
    """Foreseen 20 + 10, spent 20 + 25: half as much again; then, put right, 1.2 times what was foreseen."""
    first = [opened(1, "a", decision=predicting(9.0, 1.0)), settled(1, compute_joules=20.0, upload_joules=10.0)]
    assert learnt(*first).errors == {}, "there was none before it"
    second = [*first, opened(2, "a", decision=predicting(20.0, 10.0)), came(2, compute_joules=20.0)]
    assert learnt(*second).errors == {}, "its upload is not told yet"
    third = [*second, settled(2, compute_joules=20.0, upload_joules=25.0)]
    assert learnt(*third).errors["a"] == {"joules_error": pytest.approx(1.5)}
    again = [
        opened(3, "a", decision=predicting(30.0, 15.0, joules_error=1.5)),
        settled(3, compute_joules=30.0, upload_joules=24.0),
    ]
    assert learnt(*third, *again).errors["a"]["joules_error"] == pytest.approx(0.5 * 1.5 + 0.5 * 1.5 * 1.2)
    other = msgspec.structs.replace(predicting(20.0, 10.0).devices["a"], values={"keep": 0.6})
    for decision in (predicting(20.0, 10.0, "default"), Decision(optimizer="keep_ratio", devices={"a": other})):
        unlike = [opened(2, "a", decision=decision), settled(2, compute_joules=20.0, upload_joules=25.0)]
        assert learnt(*first, *unlike).errors == {}, "what was foreseen of another task knows better the next time"
