"""What tests of every part may ask for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machine import Disk, mounted

if TYPE_CHECKING:  # most tests of the agent need no torch
    from tests.edge_server.fleets import Network

ROOT = Path(__file__).parent.parent


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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: sums are taken in one order, and small networks leave the other core alone."""
    import torch  # noqa: PLC0415

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain_split() -> Iterator[None]:
    """Register the tests' own split method while a module's tests last."""
    from shared.algorithms import ALGORITHMS  # noqa: PLC0415
    from tests.trees import plain  # noqa: PLC0415

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
    from edge_server.fleet import broker  # noqa: PLC0415
    from shared.transport.base import Broker  # noqa: PLC0415
    from tests.edge_server.fleets import Network  # noqa: PLC0415

    if request.param == "memory":
        yield Network()
        return
    if request.param == "mosquitto" and not broker.mosquitto():
        pytest.skip("mosquitto is not installed")
    folder, embedded = tmp_path_factory.mktemp("broker"), request.param == "embedded"
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        running = runner.run(stack.enter_async_context(broker.running(folder, embedded=embedded)))
        assert running.kind == request.param
        yield Network(Broker(port=running.port, version=3 if embedded else 5), runner)
        runner.run(stack.aclose())
