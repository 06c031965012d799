"""Upload pacing: the formula, links of any speed, and delivery by a device."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_agent.exchange.token_bucket import BURST_S, MIN_BITS_PER_S, TokenBucket
from device_agent.exchange.upload import MAX_WAIT_S
from shared.protocol.messages import Assignment, Hyper, Want
from tests.device_agent.server_side import DATA, ack

pytestmark = pytest.mark.virtual_time


def seconds(bucket: TokenBucket, sizes: list[int], link_bits_per_s: float = math.inf, now: float = 0.0) -> float:
    """Send frames one after the other, each as soon as it may go; return when the last has left."""
    for size in sizes:
        now += bucket.take(size, now)
        now += 8 * size / link_bits_per_s
        bucket.note_sent(now)
    return now


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=30), rate=st.floats(1e4, 1e8))
def test_a_transfer_takes_its_bits_over_the_rate(sizes, rate):
    assert seconds(TokenBucket(rate), sizes) == pytest.approx(8 * sum(sizes) / rate)


@settings(deadline=None)
@given(rate=st.floats(1e5, 1e7), faster=st.floats(1.0, 10.0), frames=st.integers(5, 40))
def test_the_link_costs_none_of_the_rate(rate, faster, frames):
    """Over a link that is as fast or faster, only the last frame's own way comes on top."""
    size = 20_000
    took = seconds(TokenBucket(rate), [size] * frames, rate * faster)
    assert 8 * size * frames / rate <= took + 1e-9
    assert took <= 8 * size * (frames + 1 / faster) / rate + 1e-6


@settings(deadline=None)
@given(share=st.floats(0.05, 1.0), sizes=st.lists(st.integers(1000, 10**6), min_size=1, max_size=30))
def test_over_a_known_link_not_even_the_last_frame_comes_on_top(share, sizes):
    bucket = TokenBucket()
    bucket.tune(share * 1e6, share)
    assert seconds(bucket, sizes, 1e6) == pytest.approx(8 * sum(sizes) / (share * 1e6))


def test_another_rate_begins_anew():
    """What a slow link left undone at a rate beyond its own is no credit for the next task."""
    bucket = TokenBucket(1e7)
    ended = seconds(bucket, [10_000] * 50, 1e6)
    bucket.tune(1e5, 0.1)
    assert seconds(bucket, [10_000] * 10, 1e6, ended) == pytest.approx(ended + 8.0)


def test_a_slower_link_is_not_slowed_further():
    assert seconds(TokenBucket(2e6), [10_000] * 50, 1e6) == pytest.approx(50 * 0.08, abs=0.05)


def test_a_silence_leaves_only_a_moment_of_tokens():
    bucket = TokenBucket(1e6)
    ended = seconds(bucket, [125_000])
    assert ended == pytest.approx(1.0)
    assert bucket.take(125_000, ended + 60.0) == pytest.approx(1.0 - BURST_S)


@pytest.mark.parametrize("rate", [None, 0.0, -1.0, math.nan, math.inf])
def test_what_is_no_rate_is_no_limit(rate):
    bucket = TokenBucket(1e3)
    bucket.tune(rate)
    assert seconds(bucket, [10**6]) == 0.0


@pytest.mark.parametrize(("rate", "share"), [(1e-6, None), (5e-324, None), (1e-6, 0.5), (1e-300, 1e-300)])
def test_no_rate_is_so_low_that_a_frame_never_goes(rate, share):
    bucket = TokenBucket()
    bucket.tune(rate, share or 0.0)
    assert seconds(bucket, [1000, 1000]) == pytest.approx(8 * 2000 / MIN_BITS_PER_S, rel=0.6)


async def test_a_rate_does_not_outlive_its_task(desk, describe) -> None:
    """While frames wait at a rate that is far too low, an ack ends their sending, and the next task's rate counts."""
    desk.put(1, DATA, describe(DATA))
    want = Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 6)])
    async with desk.running():
        desk.delivery.uploads.clock = asyncio.get_running_loop().time
        desk.delivery.allow(Assignment(seed=0, hyper=Hyper(), values={"up_bits_per_s": 1e-6}))
        await desk.tell(want, pause_s=1.0)
        assert desk.frames == []
        desk.delivery.allow(Assignment(seed=0, hyper=Hyper()))
        await asyncio.sleep(MAX_WAIT_S)
        assert desk.frames == list(range(6))
        desk.delivery.allow(Assignment(seed=0, hyper=Hyper(), values={"up_bits_per_s": 1e-6}))
        await desk.tell(want, pause_s=1.0)
        await desk.tell(ack(1), pause_s=0.1)
        assert not desk.outbox.entries()
        assert desk.frames == list(range(6))


async def test_a_delivery_keeps_to_the_rate_of_the_newest_task(desk, describe) -> None:
    """Six frames of 1 KiB, the last of 17 bytes, at 8 kbit/s: a second each; then as fast as they go."""
    desk.put(1, DATA, describe(DATA))
    want = Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 6)])
    async with desk.running():
        desk.delivery.uploads.clock = asyncio.get_running_loop().time
        desk.delivery.allow(Assignment(seed=0, hyper=Hyper(), values={"up_bits_per_s": 8192.0}))
        await desk.tell(want, pause_s=2.6)
        assert desk.frames == [0, 1]
        await asyncio.sleep(5.0)
        assert desk.frames == list(range(6))
        desk.delivery.allow(Assignment(seed=0, hyper=Hyper()))
        await desk.tell(want, pause_s=0.01)
        assert desk.frames == 2 * list(range(6))
