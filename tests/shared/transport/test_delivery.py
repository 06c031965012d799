"""What every transport must do: the same tests over memory, mosquitto and the embedded broker, MQTT 5 and 3.1.1."""

from __future__ import annotations

import asyncio

import pytest


async def test_a_filter_takes_what_it_matches(site, take):
    """One level, many levels, an exact name; the same filter leaves the rest alone."""
    async with (
        site.clients(4) as (a, b, c, d),
        a.subscribe(site.topic("+/task")) as level,
        b.subscribe(site.topic("x/#")) as below,
        c.subscribe(site.topic("y/ack")) as exact,
    ):
        for name in ("x/task", "x/y/task", "y/ack", "y/task", "end/task", "x/end"):
            await d.publish(site.topic(name), name.encode())
        assert [data for _, data in await take(level, 3)] == [b"x/task", b"y/task", b"end/task"]
        assert [data for _, data in await take(below, 3)] == [b"x/task", b"x/y/task", b"x/end"]
        assert await take(exact, 1) == [(site.topic("y/ack"), b"y/ack")]


@pytest.mark.parametrize("assured", [True, False])
async def test_order(site, take, assured):
    """Two hundred messages on two topics, in the order they were published."""
    async with site.clients(2) as (a, b), a.subscribe(site.topic("#")) as inbox:
        for number in range(200):
            await b.publish(site.topic(f"t{number % 2}"), str(number).encode(), assured=assured)
        assert [int(data) for _, data in await take(inbox, 200)] == list(range(200))


async def test_concurrent_publishers_all_arrive(site, take):
    """Eight tasks of one client publish at once; each task's own messages keep their order."""
    async with site.clients(2) as (a, b), a.subscribe(site.topic("#")) as inbox:

        async def publish(who: int) -> None:
            for number in range(10):
                await b.publish(site.topic(f"{who}"), str(number).encode())

        await asyncio.gather(*map(publish, range(8)))
        got = await take(inbox, 80)
        for who in range(8):
            assert [int(data) for name, data in got if name == site.topic(f"{who}")] == list(range(10))


@pytest.mark.parametrize("assured", [True, False])
@pytest.mark.parametrize("size", [0, 1, 300 * 1024])
async def test_payloads_arrive_byte_for_byte(site, take, size, assured):
    """Nothing, one byte, and more than a frame of 256 KiB, ten in a row: every byte value, no change."""
    payload = bytes(range(256)) * (size // 256) if size > 1 else b"\0" * size
    async with site.clients(2) as (a, b), a.subscribe(site.topic("x")) as inbox:
        for _ in range(10):
            await b.publish(site.topic("x"), payload, assured=assured)
        for _, data in await take(inbox, 10):
            assert isinstance(data, bytes)
            assert data == payload


async def test_retained(site, take):
    """A later subscriber gets the last retained message of each topic, and then what is new; empty removes it."""
    async with site.clients(2) as (a, b):
        await b.publish(site.topic("x/status"), b"old", retain=True)
        await b.publish(site.topic("x/status"), b"new", retain=True)
        await b.publish(site.topic("y/status"), b"y", retain=True)
        await b.publish(site.topic("z/status"), b"not kept")
        async with a.subscribe(site.topic("+/status")) as inbox:
            assert sorted(await take(inbox, 2)) == [
                (site.topic("x/status"), b"new"),
                (site.topic("y/status"), b"y"),
            ]
            await b.publish(site.topic("x/status"), b"newer", retain=True)
            assert await take(inbox, 1) == [(site.topic("x/status"), b"newer")]
        await a.publish(site.topic("x/status"), b"", retain=True)
        async with a.subscribe(site.topic("+/status")) as inbox:
            assert await take(inbox, 1) == [(site.topic("y/status"), b"y")]
            await b.publish(site.topic("end/status"), b"end")
            assert await take(inbox, 1) == [(site.topic("end/status"), b"end")]


async def test_two_subscriptions_in_one_client(site, take):
    """Each has its own inbox. Where filters overlap both get it, at least once; leaving one leaves the other."""
    async with site.clients(2) as (a, b), a.subscribe(site.topic("x/+")) as wide:
        async with a.subscribe(site.topic("x/1")) as narrow, a.subscribe(site.topic("y")) as other:
            await b.publish(site.topic("x/1"), b"both")
            await b.publish(site.topic("y"), b"other")
            assert await take(wide, 1) == [(site.topic("x/1"), b"both")]
            assert await take(narrow, 1) == [(site.topic("x/1"), b"both")]
            assert await take(other, 1) == [(site.topic("y"), b"other")]
        await b.publish(site.topic("x/1"), b"after")
        got = await take(wide, 1)
        while got[-1][1] == b"both":  # over MQTT it may have come once for each filter
            got += await take(wide, 1)
        assert got[-1] == (site.topic("x/1"), b"after")


async def test_the_same_filter_twice(site, take):
    """Both inboxes get everything; when one block is left, the filter stays for the other."""
    async with site.clients(2) as (a, b), a.subscribe(site.topic("x")) as first:
        async with a.subscribe(site.topic("x")) as second:
            await b.publish(site.topic("x"), b"1")
            assert await take(first, 1) == await take(second, 1) == [(site.topic("x"), b"1")]
        await b.publish(site.topic("x"), b"2")
        assert await take(first, 1) == [(site.topic("x"), b"2")]


async def test_several_filters_in_one_subscription(site, take):
    """One inbox, in order of publication."""
    async with site.clients(2) as (a, b), a.subscribe(site.topic("x"), site.topic("y/#")) as inbox:
        for name in ("x", "y/1", "z", "y/2", "x"):
            await b.publish(site.topic(name), b"")
        assert [name for name, _ in await take(inbox, 4)] == [site.topic(n) for n in ("x", "y/1", "y/2", "x")]


async def test_leaving_the_block_ends_the_subscription(site, take):
    """What is published afterwards is neither delivered nor kept for the next subscription of the same filter."""
    async with site.clients(2) as (a, b):
        async with a.subscribe(site.topic("x")) as left:
            await b.publish(site.topic("x"), b"inside")
            await take(left, 1)
        await a.publish(site.topic("word"), b"")  # when the broker has this, it has heard of the end
        await b.publish(site.topic("x"), b"outside")
        async with a.subscribe(site.topic("x")) as inbox:
            await b.publish(site.topic("x"), b"again")
            assert await take(inbox, 1) == [(site.topic("x"), b"again")]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(left), 0.05)


async def test_a_cancelled_wait_loses_nothing(site):
    """The receiver gives up again and again, as it does on every timeout; every message still comes, in order."""
    async with site.clients(2) as (a, b), a.subscribe(site.topic("x")) as inbox:

        async def publish() -> None:
            for number in range(100):
                await b.publish(site.topic("x"), str(number).encode(), assured=number % 10 == 0)
                await asyncio.sleep(0.0002 * (number % 3))

        publishing, got, given_up = asyncio.create_task(publish()), [], 0
        while len(got) < 100:
            try:
                async with asyncio.timeout(0.0003):
                    got.append(int((await anext(inbox))[1]))
            except TimeoutError:
                given_up += 1
        await publishing
        assert got == list(range(100))
        assert given_up > 0


async def test_a_client_hears_itself(site, take):
    """Publishing to one's own filter is nothing special."""
    async with site.clients(1) as (a,), a.subscribe(site.topic("x")) as inbox:
        await a.publish(site.topic("x"), b"me")
        assert await take(inbox, 1) == [(site.topic("x"), b"me")]
