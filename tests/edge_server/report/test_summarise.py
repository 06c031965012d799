"""A journal's digest, in numbers small enough to check by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from edge_server.journal.records import (
    CostSettled,
    Evaluated,
    Joined,
    Left,
    Noted,
    Rewound,
    RoundOpened,
    RunOpened,
    Sensed,
    ServerBegan,
)
from edge_server.record.amounts import NONE, UNKNOWN, Amount
from edge_server.report.csv_export import csv_text
from edge_server.report.page import render_page
from edge_server.report.sections.time_energy import time_and_energy
from edge_server.report.summarise import digest_run, sum_joules
from shared.errors import ConfigError
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper
from tests.edge_server.report.journals import CORRECTED, MODELLED, begin, closed, cost, opened, parsed, small, update


def values(split) -> dict[str, float | None]:
    return {name: amount.value for name in split.__struct_fields__ if (amount := getattr(split, name)) != NONE}


def test_where_the_time_of_a_round_went():
    """4 s: a tenth of 2 s down, 2 s, a quarter of 2 s up, the rest waited; who was late waited for nobody."""
    first, late, *_ = digest_run(small()).tasks
    assert values(first.seconds) == pytest.approx({"download": 0.2, "compute": 2.0, "upload": 0.5, "waiting": 1.3})
    assert (late.device, late.arrival) == ("b", "late")
    assert values(late.seconds) == pytest.approx({"download": 0.6, "compute": 6.0, "upload": 1.5, "waiting": 0.0})


def test_where_the_energy_went():
    """At 4 W, of which 2 W are idling: half of each part is above."""
    first = digest_run(small()).tasks[0]
    assert values(first.joules) == pytest.approx({"download": 0.8, "compute": 8.0, "upload": 2.0, "above_idle": 5.4})
    assert sum_joules(first) == Amount(value=pytest.approx(10.8))


def test_what_a_run_had_taken_by_a_round():
    """The late device's joules count; its bytes up are not known, so that the sum of all is a bound."""
    one, two = digest_run(small()).rounds
    assert one.joules == Amount(value=pytest.approx(10.8 + 32.4))
    assert two.until.joules == Amount(value=pytest.approx(10.8 + 32.4 + 10.8 + 16.2))
    assert two.until.seconds == Amount(value=8.0)
    assert one.bytes_up == Amount(value=1000.0, whole=False)
    assert one.bytes_down == Amount(value=2000.0), "its settled cost says what it received"
    assert two.until.bytes == Amount(value=3000.0 + 4000.0, whole=False)


def test_who_was_selected_arrived_was_late_or_failed():
    records = [
        begin(1),
        opened(1, ["a", "b", "c"]),
        update("a", 1, cost()),
        closed(1, ["a"], failed={"c": "no room"}),
    ]
    run = digest_run(records)
    [one] = run.rounds
    assert (one.selected, one.arrived, one.late, one.failed) == (3, 1, 1, 1)
    assert [(task.arrival, task.cause) for task in run.tasks] == [("arrived", ""), ("late", ""), ("failed", "no room")]
    assert [(one.device, one.arrived, one.late, one.failed) for one in run.devices] == [
        *(("a", 1, 0, 0), ("b", 0, 1, 0), ("c", 0, 0, 1))
    ]
    assert run.outcome == "unfinished"


def test_what_is_not_known_is_not_zero():
    """Neither of a device without sensors, nor of a failed task, nor in any sum of them."""
    records = [
        *(begin(1), opened(1, ["a", "b"]), update("a", 1, cost(watts=None))),
        closed(1, ["a"], failed={"b": "no room"}, bytes_down={}),
    ]
    run = digest_run(records)
    assert run.tasks[0].joules.compute == run.devices[0].joules.compute == UNKNOWN
    assert run.tasks[1].seconds.waiting == UNKNOWN, "nobody knows what of the round it waited"
    assert run.rounds[0].joules == run.rounds[0].until.joules == UNKNOWN
    assert run.rounds[0].bytes_down == Amount(value=1000.0, whole=False), "the device itself said it"
    assert run.devices[0].accuracy is None


def test_an_upload_that_nobody_settled_leaves_the_waiting_unknown():
    cut = msgspec.structs.replace(cost(), upload_s=None, upload_joules=None)
    [task] = digest_run([begin(1), opened(1, ["a"]), update("a", 1, cut), closed(1, ["a"])]).tasks
    assert task.seconds.upload == task.seconds.waiting == UNKNOWN
    assert sum_joules(task) == Amount(value=pytest.approx(8.8), whole=False)
    assert task.joules.above_idle == Amount(value=pytest.approx(4.4), whole=False)


def test_the_settled_cost_stands_for_the_updates():
    records = [
        *(begin(1), opened(1, ["a"]), update("a", 1, Cost(compute_s=1.0))),
        *(CostSettled(round=1, device="a", cost=cost(3.0)), closed(1, ["a"])),
    ]
    assert digest_run(records).tasks[0].seconds.compute == Amount(value=3.0)


def test_a_sum_is_as_good_as_its_worst_part():
    records = [
        *(begin(1), opened(1, ["a", "b", "c"])),
        *(
            update("a", 1, cost()),
            update("b", 1, cost(provenance=CORRECTED)),
            update("c", 1, cost(provenance=MODELLED)),
        ),
        closed(1, ["a", "b", "c"]),
    ]
    run = digest_run(records)
    assert [sum_joules(one).quality for one in run.devices] == [None, "corrected", "modelled"]
    assert run.rounds[0].joules.quality == "modelled"
    assert run.tasks[1].joules.above_idle.quality == "corrected"


def test_what_no_device_can_have_spent_does_not_stop_the_report():
    """A sum of such figures would overflow."""
    untrue = Cost(compute_s=1.7e308, compute_joules=1.7e308, bytes_down=1 << 62)
    records = [begin(1), opened(1, ["a", "b"]), update("a", 1, untrue), update("b", 1, untrue), closed(1, ["a", "b"])]
    assert digest_run(records).rounds[0].joules == UNKNOWN


@pytest.mark.parametrize("told", [1e308, -1000.0, -1e308, math.inf])
def test_what_no_device_can_have_measured_does_not_stop_the_report(told):
    """A journal of before, when a server took such figures: its page is made without them."""
    records = [
        *(begin(1), opened(1, ["a"]), update("a", 1, cost(), loss=told)),
        closed(1, ["a"], accuracy=told, test_loss=told * 10, loss=told * 10, device_accuracy=told),
        Evaluated(accuracy=told, by_device={"a": {"eval_accuracy": told}}),
    ]
    digest = digest_run(records)
    assert digest.device_accuracy is digest.devices[0].accuracy is digest.rounds[0].accuracy is None
    assert {"nan", "inf", "1e+308"}.isdisjoint(parsed(render_page([digest])).words().lower().split())


def test_a_void_round_is_not_in_the_digest():
    """A checkpoint was lost: round 1 was done again, without b."""
    records = [
        *(begin(2), opened(1, ["a", "b"]), update("a", 1, cost(9.0)), closed(1, ["a"], seconds=50.0)),
        Rewound(round=1, cause="torn"),
        *(opened(1, ["a"]), update("a", 1, cost(1.0)), closed(1, ["a"])),
    ]
    run = digest_run(records)
    assert (run.went_back, len(run.rounds), run.rounds[0].until.seconds.value) == (1, 1, 4.0)
    assert [(task.device, task.seconds.compute.value) for task in run.tasks] == [("a", 1.0)]


def test_a_round_that_has_not_ended_does_not_count_yet():
    run = digest_run([begin(2), opened(1, ["a"]), update("a", 1, cost())])
    assert (run.rounds, run.tasks, run.devices) == ([], [], [])


def test_a_round_whose_beginning_is_lost_keeps_its_figures():
    """A salvaged journal may lack it; who was told what is then not known."""
    run = digest_run([begin(1), closed(1, ["a"])])
    assert (run.rounds[0].accuracy, run.rounds[0].joules, run.tasks) == (0.5, Amount(), [])


def test_what_devices_were_told():
    """Of a list, its length; of a flag, 1 or 0; a word is a word."""
    told = Assignment(seed=1, hyper=Hyper(), values={"active": [3, 5, 8], "warm": True, "codec": "dense", "keep": 0.5})
    run = digest_run([begin(1), RoundOpened(round=1, assignments={"a": told}), closed(1, ["a"])])
    assert run.tasks[0].told["learning_rate"] == 0.05
    assert {name: run.tasks[0].told[name] for name in told.values} == {
        "active": 3.0,
        "warm": 1.0,
        "codec": "dense",
        "keep": 0.5,
    }


def test_who_came_and_went_and_on_what():
    records = [
        *(
            begin(1, live=True),
            ServerBegan(at=0.0, versions={"torch": "2"}),
            ServerBegan(at=0.0, versions={"torch": "3"}),
        ),
        *(Joined(device="a", at=1.0, version="0.1"), Sensed(device="a", at=1.0, readings={}, board="pi")),
        *(Left(device="a", at=2.0), Joined(device="a", at=3.0), Sensed(device="a", at=3.0, readings={})),
        *(opened(1, ["a", "b"]), closed(1, ["a"]), Noted(what="a gap was filled")),
    ]
    run = digest_run(records)
    assert [(one.board, one.version, one.went_away) for one in run.devices] == [("pi", "0.1", 1), ("", "", 0)]
    assert (run.live, run.versions, run.servers, run.notes) == (True, {"torch": "3"}, 2, ["a gap was filled"])


def test_the_highest_of_a_gpu_and_of_swap_is_told_of_boards_that_have_them():
    """On the page a column each, where some board had more than nothing of it; in CSV a line."""
    hot = {"gpu.load_ratio": 0.9, "gpu.hottest_celsius": 61.0, "memory.swap_used_bytes": 0.0}
    records = [
        *(begin(1), Sensed(device="a", at=1.0, readings=hot), Sensed(device="b", at=1.0, readings={})),
        Sensed(device="a", at=3.0, readings=hot | {"gpu.load_ratio": 0.4, "gpu.hottest_celsius": 66.5}),
        *(opened(1, ["a", "b"]), closed(1, ["a", "b"])),
    ]
    run = digest_run(records)
    assert [one.most for one in run.devices] == [hot | {"gpu.hottest_celsius": 66.5}, {}]
    page = str(time_and_energy(run))
    assert "90.00 %" in page
    assert "66.5 °C" in page
    assert "MiB" not in page, "of swap"
    assert ",a,most.gpu.hottest_celsius,66.5," in "".join(csv_text([run]))


def test_measuring_before_the_first_round_is_kept_apart():
    records = [*small(), update("a", 0, cost())]
    assert digest_run(records).measuring == Amount(value=pytest.approx(10.8))
    assert digest_run(records).rounds == digest_run(small()).rounds
    assert digest_run(small()).measuring == Amount()


def test_a_journal_without_a_beginning_says_so():
    with pytest.raises(ConfigError):
        digest_run([one for one in small() if not isinstance(one, RunOpened)])


def test_devices_are_in_the_order_of_their_numbers():
    names = ["pi-10", "pi-2", "pi", "10", "9", "pi-2b"]
    records = [begin(1), opened(1, names), closed(1, [])]
    assert [one.device for one in digest_run(records).devices] == ["9", "10", "pi", "pi-2", "pi-2b", "pi-10"]
