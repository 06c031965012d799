"""Fixtures without torch: parameters of a small network, a task, a few examples."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from device_agent.exchange.outbox import Outbox
from device_agent.exchange.upload import Delivery
from device_agent.trainer.interface import Job
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from shared.data.spec import Data
from shared.protocol import payload
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Blob, Hyper, Payload, Spec, Task, Transfer
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transport.memory import MemoryTransport
from tests.device_agent.agent_side import Site
from tests.device_agent.server_side import MODEL, Desk, ModelServer, download

FRAME_BYTES = 1024


@pytest.fixture(scope="session")
def describe() -> Callable[[bytes], Transfer]:
    """Return what a receiver is told of a run of bytes."""
    return lambda data: Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=FRAME_BYTES)


@pytest.fixture(scope="session")
def cut() -> Callable[[bytes, Transfer, int], bytes]:
    """Return one frame of a run of bytes."""

    def frame(data: bytes, transfer: Transfer, index: int) -> bytes:
        begin = index * transfer.frame_bytes
        return frames.encode(transfer, index, [memoryview(data)[begin : begin + transfer.frame_bytes]])

    return frame


@pytest.fixture(scope="session")
def parameters() -> bytes:
    """Return the payload of a perceptron with 4 features, 8 hidden units and 2 classes."""
    shapes = {"1.weight": (8, 4), "1.bias": (8,), "3.weight": (2, 8), "3.bias": (2,)}
    random, blobs = Random(7), {}
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array("f", [random.uniform(-0.5, 0.5) for _ in range(count)])
        blobs[name] = Blob("f32", shape, memoryview(values).cast("B"))
    return b"".join(payload.pack(Payload(codec="dense", blobs=blobs)))


@pytest.fixture(scope="session")
def make_task(parameters: bytes, describe: Callable[[bytes], Transfer]) -> Callable[..., Task]:
    """Return tasks that differ from a plain one in the fields given."""
    plain = Task(
        run="trial",
        round=1,
        device="board",
        algorithm=Spec(name="fedavg"),
        model=Spec(name="mlp", options={"features": 4, "hidden": 8, "classes": 2}),
        codec=Spec(name="dense"),
        assignment=Assignment(seed=3, hyper=Hyper(batch_size=8, learning_rate=0.1)),
        params=describe(parameters),
        shared=False,
        deadline_s=60.0,
    )
    return lambda **fields: msgspec.structs.replace(plain, **fields)


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Return 40 points in two classes that a line tells apart; a quarter is held out."""
    path = tmp_path_factory.mktemp("examples") / "points.csv"
    random, lines = Random(11), ["a,b,c,d,label"]
    for number in range(40):
        kind = number % 2
        point = (f"{random.gauss(2.0 * kind - 1.0, 0.5):.3f}" for _ in range(4))
        lines.append(",".join([*point, str(kind)]))
    path.write_text("\n".join(lines) + "\n")
    return Data(source="csv", path=str(path), holdout=0.25)


@pytest.fixture
def make_job(tmp_path: Path, parameters: bytes, examples: Data) -> Callable[[Task, Path], Job]:
    """Return jobs on the parameters, which lie in a file as the download leaves them."""
    params, states = tmp_path / "params", tmp_path / "state"
    states.mkdir(exist_ok=True)

    def job(task: Task, draft: Path) -> Job:
        params.write_bytes(parameters)
        return Job(
            task=task,
            params=str(params),
            state=str(states / task.run),
            draft=str(draft),
            data=examples,
            frame_bytes=FRAME_BYTES,
            cost=Cost(download_s=0.5, bytes_down=len(parameters)),
        )

    return job


@pytest.fixture
def site(tmp_path: Path, parameters: bytes, cut) -> Site:
    """Return an agent that does not live yet, with a stub trainer."""
    return Site(tmp_path, parameters, cut)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Return a delivery that does not run yet, and a server that speaks with it."""
    transport, box = MemoryTransport(), Outbox(tmp_path / "outbox", tmp_path / "state")
    return Desk(transport, box, Delivery(transport, "lab", "board", box))


@pytest.fixture
def sender(describe, cut) -> ModelServer:
    """Return a server that sends 20 frames when asked."""
    return ModelServer(MemoryTransport(), describe(MODEL), cut)


@pytest.fixture
def fetch(sender: ModelServer, make_task, tmp_path: Path, virtually) -> Callable[..., tuple[bytes, int]]:
    """Fetch from the sender in virtual time; return what lies in the file, and the bytes that came for it."""

    def run(*others: Coroutine[Any, Any, None], **fields: object) -> tuple[bytes, int]:
        async def routine() -> tuple[Path, int]:
            async with background(sender.run(), *others):
                await asyncio.sleep(0)  # let the sender subscribe
                return await download(sender.transport, tmp_path).fetch(make_task(params=sender.transfer, **fields))

        path, received = virtually(routine())
        return path.read_bytes(), received

    return run


@pytest.fixture
def device(tmp_path: Path, make_job):
    """Return a device that trains in this process; torch is imported here, so that light tests stay light."""
    from tests.device_agent.agent_side import Device  # noqa: PLC0415

    return Device(tmp_path, make_job, Outbox(tmp_path / "outbox", tmp_path / "state"))


@pytest.fixture(scope="module")
def shared_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, TrainerProcess]]:
    """Return a trainer with its real child, which the tests of a module share."""
    with asyncio.Runner() as runner:
        trainer = TrainerProcess(tmp_path_factory.mktemp("board") / "lock", 600.0, TrainerOptions(threads=1))
        yield runner, trainer
        runner.run(trainer.close())
