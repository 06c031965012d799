"""Who is there: births and deaths may come late, twice, or of a session that is long over."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.fleet.membership import Membership
from edge_server.fleet.state import FRESH_REPORTS, REMEMBERED, Fleet
from shared.protocol import wire
from shared.protocol.messages import Report, Status
from shared.transport.presence import READY, SERVES, build_presence


def status(session: int, *, online: bool, device: str = "pi", instance: str = "a") -> Status:
    """Return a birth or a death."""
    return Status(device=device, session=session, instance=instance, online=online)


def after(*messages: Status | Report) -> Fleet:
    """Return the fleet after messages."""
    fleet = Fleet()
    for message in messages:
        fleet.observe(message)
    return fleet


def test_a_birth_makes_a_device_online_and_its_death_ends_it():
    """Devices are told in order of name, whenever they came."""
    assert after(status(1, online=True), status(1, online=True, device="nano")).online == ("nano", "pi")
    assert after(status(1, online=True), status(1, online=False)).online == ()


def test_the_late_will_of_an_older_session_does_not_end_a_newer_one():
    """A broker may find out about a dead link long after the device has connected again."""
    assert after(status(4, online=True), status(5, online=True), status(4, online=False)).online == ("pi",)


def test_a_board_with_a_new_disk_is_seen_although_it_counts_from_one_again():
    """Else it would be invisible until the server restarts."""
    reborn = after(status(57, online=True), status(57, online=False), status(1, online=True, instance="b"))
    assert reborn.online == ("pi",)
    assert reborn.observe(status(1, online=False, instance="b"))
    assert reborn.online == ()


def test_a_death_whose_birth_was_never_heard_counts():
    """The server was away when the newer session began and ended: only its retained will is left."""
    assert after(status(4, online=True), status(5, online=False)).online == ()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(deaths=st.lists(st.integers(1, 9), max_size=8), last=st.integers(2, 10))
def test_no_order_of_old_deaths_ends_the_newest_session(deaths, last):
    """Whatever arrives of sessions before the last."""
    old = [status(session, online=False) for session in deaths if session < last]
    assert after(status(last, online=True), *old).online == ("pi",)


def test_a_late_will_from_before_the_disk_was_replaced_does_not_end_the_new_board():
    """Its number is far larger than any of the new board's, but its process has been superseded."""
    replaced = after(status(57, online=True), status(1, online=True, instance="b"))
    assert not replaced.observe(status(57, online=False))
    assert not replaced.observe(status(58, online=False))


def test_what_a_process_said_before_changes_nothing_when_it_comes_again():
    """A broker may repeat an old birth, of this process or of the one before; a repeated present one is harmless."""
    fleet = after(status(1, online=True), status(2, online=True), status(3, online=True, instance="b"))
    assert not fleet.observe(status(2, online=True))
    assert fleet.observe(status(4, online=True, instance="b"))
    assert not fleet.observe(status(3, online=True, instance="b"))
    before = fleet.statuses | {}
    assert fleet.observe(status(4, online=True, instance="b"))
    assert fleet.statuses == before


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["reconnect", "restart", "new disk", "unwritable disk"]), max_size=12),
    data=st.data(),
)
def test_only_the_newest_sessions_own_death_ends_it(steps, data):
    """Births in order, earlier deaths at any later moment, twice, or never; counters that begin anew or repeat."""
    fleet, instance, number, stored, dead = Fleet(), 0, 0, 0, []
    for step in ["restart", *steps]:
        if step != "reconnect":
            instance += 1
            number = stored if step != "new disk" else 0
        number += 1
        stored = stored if step == "unwritable disk" else number
        fleet.observe(status(number, online=True, instance=f"{instance}"))
        late = data.draw(st.lists(st.sampled_from(dead), max_size=3)) if dead else []
        for death in late:
            fleet.observe(death)
        assert fleet.online == ("pi",)
        dead.append(status(number, online=False, instance=f"{instance}"))
    assert fleet.observe(dead[-1])
    assert fleet.online == ()


def doubles(*messages: Status) -> list[int]:
    """Return the places of the messages that showed an id used twice."""
    fleet, found = Fleet(), []
    for place, message in enumerate(messages):
        if fleet.is_duplicate_id(message):
            found.append(place)
        fleet.observe(message)
    return found


def test_births_that_take_turns_show_an_id_used_twice():
    """A, B, A, B: from the third on. What a board does alone shows nothing: it reconnects, restarts, repeats itself."""
    a, b = (lambda n: status(n, online=True, instance="a")), (lambda n: status(n, online=True, instance="b"))
    assert doubles(a(1), b(1), a(2), b(2)) == [2, 3]
    assert doubles(a(1), b(9), status(9, online=False, instance="b"), a(2)) == [3]
    assert doubles(a(1), a(2), b(3), b(4), status(2, online=False, instance="a")) == []
    assert doubles(a(1), b(2), a(1), b(2)) == []


def test_what_is_remembered_of_a_device_is_bounded():
    """A device that restarts all the time, or pretends to, takes no more room than the last of its processes."""
    fleet = after(*(status(number, online=True, instance=f"{number}") for number in range(1, 100)))
    assert list(fleet.sessions["pi"]) == [f"{number}" for number in range(100 - REMEMBERED, 100)]


def test_the_latest_report_stands():
    """A report says nothing about the presence of a device of which nothing is known."""
    fleet = after(Report(device="pi", at=1.0), Report(device="pi", at=2.0))
    assert fleet.reports["pi"].at == 2.0
    assert fleet.online == ()


def report(at: float, instance: str) -> Report:
    return Report(device="pi", at=at, instance=instance)


def test_a_report_that_comes_again_or_late_changes_nothing():
    """The broker retains the last one and gives it to whoever connects; of one process the device's clock decides."""
    fleet = after(status(1, online=True), report(5.0, "a"))
    assert not fleet.observe(report(5.0, "a"))
    assert not fleet.observe(report(4.0, "a"))
    assert fleet.observe(report(6.0, "a"))
    assert fleet.reports["pi"].at == 6.0


def test_a_report_of_a_process_that_is_gone_replaces_none_of_its_successors():
    """A board that booted again counts its seconds anew: its first report is news, and what was retained is not."""
    rebooted = after(status(7, online=True), report(90_000.0, "a"), status(8, online=True, instance="b"))
    assert rebooted.observe(report(3.0, "b"))
    assert rebooted.reports["pi"].at == 3.0
    assert not rebooted.observe(report(90_030.0, "a"))
    restarted_server = after(status(8, online=True, instance="b"))
    assert not restarted_server.observe(report(90_000.0, "a"))
    assert rebooted.observe(status(8, online=False, instance="b"))
    assert not rebooted.observe(report(90_060.0, "a"))


def test_the_last_report_of_a_board_that_is_away_is_known():
    """A late will may have replaced its retained birth; of a process nobody has heard of, nothing is known."""
    away = after(status(4, online=False), report(5.0, "b"))
    assert away.reports["pi"].at == 5.0
    assert after(report(5.0, "b"), status(4, online=True, instance="b")).reports["pi"].at == 5.0


def test_a_report_that_names_no_process_is_news_whenever_it_differs():
    """Such as an older agent's: a smaller time may be a new boot's."""
    fleet = after(status(1, online=True), report(5.0, ""))
    assert not fleet.observe(report(5.0, ""))
    assert fleet.observe(report(4.0, ""))
    assert fleet.reports["pi"].at == 4.0


def test_a_death_that_another_spoke_in_its_name_is_taken_back():
    """By its own birth, said again, whatever number and process the death named; its true death then counts."""
    for false in (status(7, online=False), status(1 << 40, online=False), status(1 << 40, online=False, instance="z")):
        fleet = after(status(7, online=True), false)
        assert fleet.online == ()
        assert not fleet.is_duplicate_id(status(7, online=True))
        assert fleet.observe(status(7, online=True))
        assert fleet.online == ("pi",)
        assert fleet.observe(status(7, online=False))
        assert fleet.online == ()


def test_a_server_that_knows_only_the_false_death_takes_the_birth():
    """It has restarted since, and the broker retained the death."""
    fleet = after(status(1 << 40, online=False), status(7, online=True))
    assert fleet.online == ("pi",)


def test_reports_prove_that_a_device_lives():
    """The first may be the one that the broker has retained, so it takes two; of a superseded process none counts."""
    fleet = after(status(1, online=True), status(2, online=True, instance="b"), report(5.0, "b"))
    fleet.observe(status(2, online=False, instance="b"))
    for at in range(6, 6 + FRESH_REPORTS):
        assert not fleet.has_fresh_reports("pi")
        fleet.observe(report(90_000.0 + at, "a"))
        fleet.observe(report(float(at), "b"))
        fleet.observe(report(float(at), "b"))
    assert fleet.has_fresh_reports("pi")
    alive = fleet.mark_online("pi")
    assert (alive.instance, alive.session, fleet.online) == ("b", 2, ("pi",))
    assert fleet.mark_online("pi") is None
    fleet.observe(status(2, online=False, instance="b"))
    assert fleet.online == ()
    assert not fleet.has_fresh_reports("pi")


def test_a_device_of_which_only_a_death_is_known_lives_until_it_dies():
    """Taken for alive since it speaks; which process does is not known, so that the next death counts."""
    fleet = after(status(9, online=False))
    assert fleet.mark_online("pi").online
    assert fleet.observe(status(3, online=False, instance="b"))
    assert fleet.online == ()


def test_a_board_that_only_serves_models_is_there_and_gets_no_tasks() -> None:
    """Also where it was held for gone and speaks again, by its will alone."""
    fleet = Fleet()
    for name, state in (("a", READY), ("b", SERVES)):
        presence = build_presence(name, "lab", name, 1, state=state)
        fleet.observe(wire.decode_as(Status, presence.birth))
        assert fleet.statuses[name].state == state
    assert fleet.online == ("a", "b")
    assert Membership().list_online(fleet) == ("a",)
    fleet.observe(wire.decode_as(Status, presence.will))
    assert fleet.mark_online("b")
    assert fleet.online == ("a", "b")
    assert Membership().list_online(fleet) == ("a",)
