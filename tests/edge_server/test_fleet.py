"""Who is there: births and deaths may come late, twice, or of a session that is long over."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.fleet import Fleet, observe
from shared.messages import Report, Status


def status(session: int, *, online: bool, device: str = "pi", instance: str = "a") -> Status:
    """Return a birth or a death."""
    return Status(device=device, session=session, instance=instance, online=online)


def after(*messages: Status | Report) -> Fleet:
    """Return the fleet after messages."""
    fleet = Fleet()
    for message in messages:
        fleet = observe(fleet, message)
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
    assert observe(reborn, status(1, online=False, instance="b")).online == ()


def test_a_death_whose_birth_was_never_heard_counts():
    """The server was away when the newer session began and ended: only its retained will is left."""
    assert after(status(4, online=True), status(5, online=False)).online == ()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(deaths=st.lists(st.integers(1, 9), max_size=8), last=st.integers(2, 10))
def test_no_order_of_old_deaths_ends_the_newest_session(deaths, last):
    """Whatever arrives of sessions before the last."""
    old = [status(session, online=False) for session in deaths if session < last]
    assert after(status(last, online=True), *old).online == ("pi",)


def test_the_latest_report_stands():
    """A report says nothing about presence, and observing changes no earlier fleet."""
    empty = Fleet()
    fleet = observe(observe(empty, Report(device="pi", at=1.0)), Report(device="pi", at=2.0))
    assert fleet.reports["pi"].at == 2.0
    assert fleet.online == ()
    assert not empty.reports
