"""The same site over every transport: memory, and MQTT 5 and 3.1.1 over the two brokers that the project may start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from edge_server.fleet import broker
from edge_server.fleet.broker import PrivateBroker
from shared.transport.base import Broker, Delivery, Inbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport

T = TypeVar("T")

PATIENCE_S = 15.0
KINDS = {
    "memory": None,
    "mosquitto-5": ("mosquitto", 5),
    "mosquitto-3": ("mosquitto", 3),
    "embedded": ("embedded", 3),
}
_numbers = count()


@dataclass
class Site:
    """One place to publish and subscribe; its topics and client ids are no other test's."""

    name: str
    broker: Broker | None
    memory: MemoryTransport = field(default_factory=MemoryTransport)

    def topic(self, rest: str) -> str:
        """Return a topic or filter of this test."""
        return f"{self.name}/{rest}"

    @asynccontextmanager
    async def clients(self, number: int) -> AsyncIterator[list[Transport]]:
        """Connect some clients, as so many processes would be."""
        if self.broker is None:
            yield [self.memory] * number
            return
        async with AsyncExitStack() as stack:
            made = []
            for _ in range(number):
                transport = MqttTransport(self.broker, f"{self.name}-{next(_numbers)}")
                made.append(await stack.enter_async_context(transport.running()))
            for transport in made:
                await transport.connected.wait()
            yield made


@pytest.fixture(scope="session")
def brokers(tmp_path_factory) -> Iterator[Callable[[str], int]]:
    """Return the port of a broker of a kind; each is started once, when it is first asked for."""
    with asyncio.Runner() as runner:
        stack, ports = AsyncExitStack(), {}

        def port(kind: str) -> int:
            if kind == "mosquitto" and not broker.mosquitto():
                pytest.skip("mosquitto is not installed")
            if kind not in ports:
                started = broker.running(tmp_path_factory.mktemp(kind), embedded=kind == "embedded")
                ports[kind] = runner.run(stack.enter_async_context(started)).port
            return ports[kind]

        yield port
        runner.run(stack.aclose())


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.broker if KINDS[kind] else ()) for kind in KINDS], ids=list(KINDS)
)
def site(request, brokers) -> Site:
    """Return a site over every kind of transport in turn."""
    chosen = KINDS[request.param]
    name = f"test-{next(_numbers)}"
    if chosen is None:
        return Site(name, None)
    kind, version = chosen
    return Site(name, Broker(port=brokers(kind), version=version))


@pytest.fixture(scope="session")
def real() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine in real time; what hangs is an error."""

    def run(routine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(asyncio.wait_for(routine, PATIENCE_S))

    return run


@pytest.fixture(scope="session")
def take() -> Callable[[Inbox, int], Coroutine[Any, Any, list[Delivery]]]:
    """Return a function that waits for so many deliveries."""

    async def some(inbox: Inbox, number: int) -> list[Delivery]:
        return [await anext(inbox) for _ in range(number)]

    return some


@dataclass
class Mortal:
    """A broker that a test may kill and start again on the same port; not started yet."""

    folder: Path
    kind: str
    version: Literal[3, 5]
    port: int

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[PrivateBroker]:
        """Run it while the block lasts, or until it is killed."""
        async with broker.running(self.folder, port=self.port, embedded=self.kind == "embedded") as running:
            yield running

    def transport(self, client_id: str, **options: Any) -> MqttTransport:
        """Return a client of it, which tries again soon however short its connections are."""
        broker = Broker(port=self.port, version=self.version)
        return MqttTransport(broker, client_id, **{"steady_s": 0.0, **options})


async def kill(running: PrivateBroker) -> None:
    """End a broker as a power cut does."""
    running.process.kill()
    await running.process.wait()


@pytest.fixture(scope="session")
def kill_broker() -> Callable[[PrivateBroker], Coroutine[Any, Any, None]]:
    return kill


@pytest.fixture(params=[kind for kind in KINDS if KINDS[kind]])
def mortal(request, tmp_path) -> Mortal:
    """Return a broker of every kind in turn."""
    kind, version = KINDS[request.param]
    if kind == "mosquitto" and not broker.mosquitto():
        pytest.skip("mosquitto is not installed")
    return Mortal(tmp_path, kind, version, broker.free_port())
