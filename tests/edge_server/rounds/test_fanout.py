"""Whatever devices ask for and however they come and go, each gets every frame, and equals cost one send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.rounds.broadcast import ALL, Fanout
from shared.transfer.frames import MAX_WINDOW

PATIENCE_S = 1.0
FRAMES = 12


def pieces(starts: Iterable[int]) -> list[tuple[int, int]]:
    """Return pieces of one block each."""
    return [(start, start + 1) for start in starts]


def due(fanout: Fanout, now: float) -> list[tuple[int, str]]:
    """Return what is due: where pieces start, and to whom they go; they stop where they were asked to."""
    found = fanout.due(now)
    assert all(stop == start + 1 for (start, stop), _ in found)
    return [(start, audience) for (start, _), audience in found]


class Fleet:
    """Devices that ask in windows, as `Assembly` does, over a link on which nothing is lost unless a test says so."""

    def __init__(self, devices: list[str], window: int = 4, frames: int = FRAMES) -> None:
        self.fanout = Fanout(devices, patience_s=PATIENCE_S)
        self.window, self.frames = window, frames
        self.have: dict[str, set[int]] = {device: set() for device in devices}
        self.shared = set(devices)
        self.sends: Counter[tuple[int, str]] = Counter()
        self.now = 0.0

    def ask(self, device: str) -> None:
        """Ask for the first frames that lack."""
        lacking = [index for index in range(self.frames) if index not in self.have[device]]
        self.fanout.want(device, pieces(lacking[: self.window]), self.now)

    def deliver(self, lost: frozenset[str] = frozenset()) -> None:
        """Send what is due; `lost` devices hear nothing of it."""
        for index, audience in due(self.fanout, self.now):
            self.sends[index, audience] += 1
            for device in self.shared - lost if audience == ALL else {audience} - lost:
                self.have.setdefault(device, set()).add(index)

    def wait(self) -> list[str]:
        """Let the patience run out; whoever is told to leave, leaves."""
        self.now += self.fanout.patience_left_s(self.now) or 0.0
        slow = self.fanout.remove_laggards(self.now)
        self.shared -= set(slow)
        return slow

    def lacking(self, device: str) -> bool:
        """Tell whether a device still waits for something."""
        return len(self.have[device]) < self.frames

    def settle(self, gone: set[str]) -> None:
        """Let everybody who is there ask until it has everything, and then be gone, as after its offer."""
        for _ in range(4 * FRAMES * len(self.have)):
            for device in sorted(set(self.have) - gone):
                if self.lacking(device):
                    self.ask(device)
                else:
                    self.fanout.drop(device)
            self.deliver()
            self.wait()
            self.deliver()


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "lose", "drop", "return", "wait"]), st.integers(0, 3)),
    max_size=40,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(steps=steps, count=st.integers(1, 4), window=st.integers(1, 6))
def test_every_device_that_goes_on_asking_gets_every_frame(steps, count, window):
    """After any history of asking, losing, dropping out, coming back and running out of patience."""
    fleet = Fleet([f"d{number}" for number in range(count)], window)
    gone: set[str] = set()
    for action, number in steps:
        device = f"d{number % count}"
        if action in ("ask", "lose") and device not in gone:
            fleet.ask(device)
        elif action == "drop":
            gone.add(device)
            fleet.fanout.drop(device)
        elif action == "return":
            gone.discard(device)
        elif action == "wait":
            fleet.wait()
        fleet.deliver(lost=frozenset({device} if action == "lose" else ()))
    fleet.settle(gone)
    assert not [device for device in fleet.have if device not in gone and fleet.lacking(device)]
    assert due(fleet.fanout, fleet.now + 100) == []
    assert fleet.fanout.patience_left_s(fleet.now) is None


@settings(max_examples=60, derandomize=True, deadline=None)
@given(count=st.integers(2, 20), window=st.integers(1, 16), frames=st.integers(1, 40))
def test_devices_in_step_cost_one_send_a_frame(count, window, frames):
    """The sender's bytes do not grow with the fleet."""
    fleet = Fleet([f"d{number}" for number in range(count)], window, frames)
    while fleet.lacking("d0"):
        for device in fleet.have:
            fleet.ask(device)
        fleet.deliver()
    assert all(have == set(range(frames)) for have in fleet.have.values())
    assert fleet.sends == {(index, ALL): 1 for index in range(frames)}


def test_a_frame_waits_until_the_last_member_has_asked_for_it():
    """Else it would have to be sent again to those who were not ready."""
    fanout = Fanout(["a", "b"], patience_s=PATIENCE_S)
    fanout.want("a", pieces(range(4)), 0.0)
    assert due(fanout, 0.0) == []
    fanout.want("b", pieces(range(2)), 0.1)
    assert due(fanout, 0.1) == [(0, ALL), (1, ALL)]
    fanout.want("b", pieces(range(2, 4)), 0.2)
    assert due(fanout, 0.2) == [(2, ALL), (3, ALL)]
    assert fanout.patience_left_s(0.2) is None


def test_one_lost_frame_is_sent_to_its_loser_alone():
    """The others have it and need not hear it again."""
    fanout = Fanout(["a", "b", "c"], patience_s=PATIENCE_S)
    for device in "abc":
        fanout.want(device, pieces([0, 1]), 0.0)
    assert due(fanout, 0.0) == [(0, ALL), (1, ALL)]
    fanout.want("b", pieces([0]), 2.0)
    assert due(fanout, 2.0) == [(0, "b")]


def test_a_laggard_is_served_alone_after_the_patience_and_the_others_go_on():
    """It is told to leave once; what it had asked for is forgotten, since it asks anew when it has left."""
    fanout = Fanout(["quick", "slow", "swift"], patience_s=PATIENCE_S)
    for device in ("quick", "swift"):
        fanout.want(device, pieces(range(4)), 5.0)
    assert fanout.patience_left_s(5.25) == 0.75
    assert fanout.remove_laggards(5.25) == []
    assert fanout.remove_laggards(6.0) == ["slow"]
    assert due(fanout, 6.0) == [(index, ALL) for index in range(4)]
    assert fanout.remove_laggards(60.0) == []
    fanout.want("slow", pieces([0, 1]), 7.0)
    assert due(fanout, 7.0) == [(0, "slow"), (1, "slow")]
    assert fanout.patience_left_s(7.0) is None


def test_patience_grows_with_the_time_the_group_takes_for_a_frame():
    """A fleet on slow links is not torn apart: half a cycle of the group may pass, not only the patience."""
    fanout = Fanout(["a", "b"], patience_s=PATIENCE_S)
    for now in (0.0, 10.0):
        for device in "ab":
            fanout.want(device, pieces([int(now)]), now)
        due(fanout, now)
    fanout.want("a", pieces([11]), 20.0)
    assert fanout.patience_left_s(20.0) == 5.0


def test_a_device_that_drops_does_not_block_the_others():
    """Nor does it go on being waited for, nor is anybody blamed for what only it had asked for."""
    fanout = Fanout(["a", "b", "c"], patience_s=PATIENCE_S)
    for device in "ab":
        fanout.want(device, pieces([0, 1]), 0.0)
    fanout.drop("c")
    assert due(fanout, 0.0) == [(0, ALL), (1, ALL)]
    fanout.want("a", pieces([2]), 0.5)
    fanout.drop("a")
    assert fanout.patience_left_s(9.0) is None
    assert fanout.remove_laggards(9.0) == []
    assert due(fanout, 9.0) == []
    fanout.want("b", pieces([2]), 9.0)
    assert due(fanout, 9.0) == [(2, ALL)]


def test_a_device_that_comes_late_is_served_alone_and_keeps_nobody_waiting():
    """It was not of the group, or has left it; the group's frames do not wait for it."""
    fanout = Fanout(["a", "b"], patience_s=PATIENCE_S)
    for device in "ab":
        fanout.want(device, pieces([0]), 0.0)
    fanout.want("late", pieces([0, 1]), 0.0)
    assert due(fanout, 0.0) == [(0, "late"), (1, "late"), (0, ALL)]
    for device in "ab":
        fanout.want(device, pieces([1]), 1.0)
    assert due(fanout, 1.0) == [(1, ALL)]


def test_one_that_resumes_far_ahead_leaves_the_others_together():
    """It asks for the end while nine are at the beginning: it is the one to go, and they still cost one send."""
    fanout = Fanout([f"d{number}" for number in range(10)], patience_s=PATIENCE_S)
    fanout.want("d9", pieces([90]), 0.0)
    assert fanout.remove_laggards(1.5) == ["d9"]
    for number in range(9):
        fanout.want(f"d{number}", pieces([0]), 1.6)
    assert due(fanout, 1.6) == [(0, ALL)]


@pytest.mark.parametrize("alone", [False, True])
def test_who_asks_for_everything_again_and_again_is_sent_a_window_of_it(alone):
    """A thousand wishes that overlap, before anything has gone: no more than a window waits, nothing of it twice."""
    fanout = Fanout(["greedy"], patience_s=1.0)
    if alone:
        fanout.leave("greedy")
    for start in range(10_000):
        fanout.want("greedy", [(start, start + 256)], 0.0)
    pieces = [piece for piece, _ in fanout.due(0.0)]
    assert 0 < len(pieces) <= MAX_WINDOW
    assert all(before[1] <= after[0] for before, after in pairwise(pieces))
    assert fanout.due(0.0) == []


def test_a_wish_in_smaller_pieces_takes_the_place_of_the_earlier_one():
    fanout = Fanout(["a"], patience_s=1.0)
    fanout.want("a", [(0, 8), (8, 16)], 0.0)
    fanout.want("a", [(0, 2), (2, 4), (4, 6)], 0.0)
    assert [piece for piece, _ in fanout.due(0.0)] == [(0, 2), (2, 4), (4, 6), (8, 16)]


def test_devices_that_are_served_alone_take_turns():
    fanout = Fanout(["greedy", "other"], patience_s=1.0)
    for device, count in (("greedy", 64), ("other", 2)):
        fanout.leave(device)
        fanout.want(device, [(start, start + 1) for start in range(count)], 0.0)
    assert [device for _, device in fanout.due(0.0)][:5] == ["greedy", "other", "greedy", "other", "greedy"]
