"""What of the agent's own transfers counts as time of the link; the kernel's counters are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from device_agent.measurement.link_meter import LinkMeter, measure_upload
from shared.transport.tcp_info import Counts, Traffic
from tests.naming import names_all

START = Counts(
    connection=1,
    address="192.0.2.1",
    at=100.0,
    acked_bytes=1000,
    received_bytes=0,
    busy_s=7.0,
    quiet_s=90.0,
    is_idle=True,
    rtt_s=0.1,
    min_rtt_s=0.05,
)
MB = 1_000_000


@dataclass
class Scripted(Traffic):
    """Traffic whose counters a test sets."""

    told: Counts | None = START

    def counts(self) -> Counts | None:
        return self.told

    def pass_up(self, size: int, busy_s: float, **changes: object) -> None:
        """Let bytes pass in busy seconds."""
        assert self.told
        assert self.told.busy_s is not None
        told = replace(self.told, acked_bytes=self.told.acked_bytes + size, busy_s=self.told.busy_s + busy_s)
        self.told = replace(told, at=told.at + busy_s, **changes)


@pytest.fixture
def traffic() -> Scripted:
    return Scripted()


@pytest.fixture
def meter(traffic) -> LinkMeter:
    return LinkMeter(traffic, clock=lambda: traffic.told.at if traffic.told else 0.0)


def test_busy_time_counts_and_the_round_trip_of_a_link_that_was_idle_does_not() -> None:
    """1 MB in 1.05 busy seconds of 5; its first byte was 50 ms on its way, and so was the last one's answer."""
    after = replace(START, acked_bytes=START.acked_bytes + MB, busy_s=8.05, at=105.0)
    assert measure_upload(START, after) == (MB, pytest.approx(1.0))
    assert measure_upload(replace(START, is_idle=False), after) == (MB, pytest.approx(1.05))


def test_an_old_kernel_is_timed_up_to_the_last_byte_it_sent() -> None:
    """Asked at 100 s, settled at 105, but the last 3.9 s nothing was sent: the server was storing."""
    after = replace(START, acked_bytes=START.acked_bytes + MB, busy_s=None, at=105.0, quiet_s=3.95)
    assert measure_upload(replace(START, busy_s=None), after) == (MB, pytest.approx(1.0))


def test_an_upload_is_what_passed_from_the_first_question_to_the_settlement(traffic, meter) -> None:
    """Asked three times, with an hour of silence that costs no busy time."""
    meter.note_progress()
    traffic.pass_up(MB, 1.0, is_idle=False)
    meter.note_progress()
    traffic.told = replace(traffic.told, at=traffic.told.at + 3600)
    traffic.pass_up(MB, 1.0, is_idle=True)
    meter.note_progress()
    traffic.pass_up(MB, 1.1)
    meter.finish_upload()
    [haul] = meter.up.transfers
    assert haul.bytes == 3 * MB
    assert haul.seconds == pytest.approx(3.0)  # 3.1 but for two round trips from idle
    assert haul.at == traffic.told.at


def test_what_passes_between_transfers_does_not_count(traffic, meter) -> None:
    for _ in range(2):
        traffic.pass_up(9 * MB, 1.0)
        meter.note_progress()
        traffic.pass_up(MB, 1.05)
        meter.finish_upload()
    assert [haul.bytes for haul in meter.up.transfers] == [MB, MB]


def test_pauses_that_we_make_are_no_time_of_the_link(traffic, meter) -> None:
    """Two frames, each from idle: 0.5 s and a round trip for either, whatever lies between."""
    meter.note_progress()
    for _ in range(2):
        meter.note_pause()
        traffic.pass_up(MB, 0.55)
        traffic.told = replace(traffic.told, at=traffic.told.at + 60)
    meter.finish_upload()
    [haul] = meter.up.transfers
    assert haul.bytes == 2 * MB
    assert haul.seconds == pytest.approx(1.0)


def test_an_old_kernel_tells_nothing_of_what_we_held_back(traffic, meter) -> None:
    """It would take our pauses for the link's slowness, and the next share would be smaller still."""
    traffic.told = replace(START, busy_s=None)
    meter.note_progress()
    meter.note_pause()
    traffic.told = replace(traffic.told, acked_bytes=MB, at=200.0, quiet_s=0.0)
    meter.finish_upload()
    assert not meter.up.transfers


def test_a_settlement_without_frames_measures_nothing(traffic, meter) -> None:
    traffic.pass_up(MB, 1.0)
    meter.finish_upload()
    assert not meter.up.transfers


@pytest.mark.parametrize("asked_between", [False, True])
def test_an_upload_over_two_connections_is_counted_on_each(traffic, meter, asked_between) -> None:
    """Between the last question on one and the first on the next nothing is known; counters begin at zero."""
    meter.note_progress()
    traffic.pass_up(MB, 1.05)
    meter.note_progress()
    if asked_between:
        traffic.told = None
        meter.note_progress()
    traffic.told = replace(START, connection=2, acked_bytes=0, busy_s=0.0, at=200.0)
    meter.note_progress()
    traffic.pass_up(2 * MB, 2.05)
    meter.finish_upload()
    [haul] = meter.up.transfers
    assert (haul.bytes, haul.seconds) == (3 * MB, pytest.approx(3.0))


def test_a_download_is_what_arrived_within_messages(traffic, meter) -> None:
    traffic.arrived_bytes, traffic.arriving_s = 5 * MB, 9.0
    with meter.measure_download():
        traffic.arrived_bytes, traffic.arriving_s = 7 * MB, 10.0
    [haul] = meter.down.transfers
    assert (haul.bytes, haul.seconds) == (2 * MB, pytest.approx(1.0))


def test_a_download_that_is_cut_short_still_tells(traffic, meter) -> None:
    def cut_short() -> None:
        with meter.measure_download():
            traffic.arrived_bytes, traffic.arriving_s = 2 * MB, 1.0
            raise TimeoutError

    with pytest.raises(TimeoutError):
        cut_short()
    assert len(meter.down.transfers) == 1


def test_another_address_is_another_link(traffic, meter) -> None:
    """From Ethernet to Wi-Fi: neither way is what it was. A new connection from the same address changes nothing."""

    def transfer() -> None:
        with meter.measure_download():
            traffic.arrived_bytes, traffic.arriving_s = traffic.arrived_bytes + MB, traffic.arriving_s + 1.0
        meter.note_progress()
        traffic.pass_up(MB, 1.05)
        meter.finish_upload()

    transfer()
    traffic.told = replace(traffic.told, connection=2)
    transfer()
    assert (len(meter.up.transfers), len(meter.down.transfers)) == (2, 2)
    traffic.told = replace(traffic.told, connection=3, address="198.51.100.1")
    transfer()
    assert (len(meter.up.transfers), len(meter.down.transfers)) == (1, 1)


def test_figures_have_the_names_of_the_report_and_their_age(traffic, meter) -> None:
    with meter.measure_download():
        traffic.arrived_bytes, traffic.arriving_s = MB, 1.0
    found = meter.read(150.0)
    assert {name: reading.value for name, reading in found.readings.items()} == {
        "link.down_bits_per_s": 8e6,
        "link.down_p20_bits_per_s": 8e6,
    }
    reading = found.readings["link.down_bits_per_s"]
    assert (reading.unit, reading.quality, reading.at) == ("bits_per_s", "measured", 100.0)
    assert reading.uncertainty is None
    assert names_all(reading.source, 1, "low")
    assert {name: lack.lack for name, lack in found.absent.items()} == {
        "link.up_bits_per_s": "not_present",
        "link.up_p20_bits_per_s": "not_present",
    }


@pytest.mark.parametrize("make", [LinkMeter, lambda: LinkMeter(Scripted(told=None))])
def test_where_the_kernel_counts_nothing_nothing_is_known(make: Callable[[], LinkMeter]) -> None:
    """As in replay, and on another system than Linux: absent, with the cause, and no zero."""
    meter = make()
    with meter.measure_download():
        meter.note_progress()
        meter.finish_upload()
    found = meter.read(0.0)
    assert not found.readings
    assert len(found.absent) == 4
