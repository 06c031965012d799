"""Fixtures of all tests: data sets, a small disk, sites over every transport.

Transports: memory, and MQTT 5 and 3.1.1 over the two brokers that the project may start.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import iscoroutinefunction, signature
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, settings

from edge_server.fleet import broker
from edge_server.fleet.broker import PrivateBroker
from shared.runtime.clock import VirtualLoop
from shared.runtime.logs import RepeatFilter
from shared.transport.base import Broker, Delivery, Inbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport
from tests.machine import Disk, free_port, mounted

if TYPE_CHECKING:  # most tests of the agent need no torch
    from tests.edge_server.fleets import Network
    from tests.edge_server.processes import Fleet

# A busy machine may take its time over any example. A landing is judged by the change, not by the day's dice.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("any machine")

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
PATIENCE_S = 300.0
MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30  # noqa: S108 - pytest makes a folder of its own there
KINDS = {
    "memory": None,
    "mosquitto-5": ("mosquitto", 5),
    "mosquitto-3": ("mosquitto", 3),
    "embedded": ("embedded", 3),
}
_numbers = count()


def pytest_configure() -> None:
    """Keep temporary files in memory; collect no garbage while tests are collected.

    A sync of a busy disk takes milliseconds, and some files of tests sync thousands of times; a machine that cannot run
    programs there, or has no room, keeps them on the disk. Nothing that is collected is garbage, and looking takes
    seconds.
    A shell that starts the tests in the background has them ignore SIGINT, and so would all that they start.
    """
    if MEMORY.is_dir():
        about = os.statvfs(MEMORY)
        room = min(about.f_bavail * about.f_frsize, psutil.virtual_memory().available)
        if room > ROOM_BYTES and not about.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load a share of the test files where several processes collect all of them: each file is compiled but once.

    In a fresh clone collecting takes half as long so; what cannot be loaded is collected, and told, as ever.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or session.config.option.file_or_dir:
        return
    share = slice(int(worker.removeprefix("gw")), None, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[share]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, then those of whole systems: none of them is left to one process at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent != ROOT / "tests"))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, of what tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test: in virtual time where it is so marked, else in real time, where a hang is an error."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters})
    if pyfuncitem.get_closest_marker("virtual_time"):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test)
    else:
        asyncio.run(asyncio.wait_for(test, PATIENCE_S))
    return True


@pytest.fixture(autouse=True)
def _usual_modes() -> Iterator[None]:
    """Have files be made as before a test: a command that runs in this process keeps what it writes to its user."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _usual_log() -> Iterator[None]:
    """Take away what a command that ran in this process logs to: the stream of that test is closed after it."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    for handler in logging.root.handlers[:]:
        if any(isinstance(one, RepeatFilter) for one in handler.filters):
            logging.root.removeHandler(handler)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of recorded data sets, or skip the test where there is none."""
    folder = ROOT / os.environ.get("FIELDFLEET_DATA", "../shared/data")
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; set FIELDFLEET_DATA to the folder of data sets")
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a disk of 4 MiB for the test."""
    with mounted(tmp_path / "disk") as small:
        yield small


@pytest.fixture(scope="session")
def virtually() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine in virtual time: seconds cost nothing and are exact."""

    def run(routine: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(routine)

    return run


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let torch, where it is loaded, compute on one thread: one order of sums, and the other core is left alone."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain_split() -> Iterator[None]:
    """Register the tests' own split method while a module's tests last."""
    from shared.algorithms import ALGORITHMS  # noqa: PLC0415
    from tests.edge_server.textbook import plain  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "plain-split", plain)
        yield


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        pytest.param("mosquitto", marks=pytest.mark.broker),
        pytest.param("embedded", marks=pytest.mark.broker),
    ],
)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Return each of the networks that a fleet may meet on."""
    from tests.edge_server.fleets import Network  # noqa: PLC0415

    if request.param == "memory":
        yield Network()
        return
    if request.param == "mosquitto" and not broker.find_mosquitto():
        pytest.skip("mosquitto is not installed")
    folder, embedded = tmp_path_factory.mktemp("broker"), request.param == "embedded"
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        running = runner.run(stack.enter_async_context(broker.run_private_broker(folder, embedded=embedded)))
        assert running.kind == request.param
        yield Network(Broker(port=running.port, version=3 if embedded else 5), runner)
        runner.run(stack.aclose())


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run a broker with agents a and b for every test that asks for them: what a test kills, it starts again."""
    from tests.edge_server.processes import waiting  # noqa: PLC0415

    with waiting(tmp_path_factory.mktemp("fleet")) as here:
        yield here


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
            if kind == "mosquitto" and not broker.find_mosquitto():
                pytest.skip("mosquitto is not installed")
            if kind not in ports:
                started = broker.run_private_broker(tmp_path_factory.mktemp(kind), embedded=kind == "embedded")
                ports[kind] = runner.run(stack.enter_async_context(started)).port
            return ports[kind]

        yield port
        runner.run(stack.aclose())


@pytest.fixture
def mosquitto_port(brokers) -> int:
    """Return the port of a mosquitto, started before the event loop of a test."""
    return brokers("mosquitto")


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
        async with broker.run_private_broker(self.folder, port=self.port, embedded=self.kind == "embedded") as running:
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
    if kind == "mosquitto" and not broker.find_mosquitto():
        pytest.skip("mosquitto is not installed")
    return Mortal(tmp_path, kind, version, free_port())
