"""Clients hammer the inference process while a board goes through 50 swaps: no request fails, none mixes versions."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from device_agent.exchange.board_releases import BoardFiles
from device_agent.inference.candidate import GateVerdict, SwapContext
from device_agent.inference.process import InferenceProcess
from device_agent.inference.settings import InferenceSettings
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.protocol.inference.release import write_manifest
from shared.protocol.update import UpdateRecord
from shared.runtime.executor import background
from tests.device_agent.inference.releases import linear_release, offer_of

CLIENTS, SWAPS, NAME, PATIENCE_S = 8, 50, "points", 120.0
MEMORY = Path("/dev/shm")  # noqa: S108 - a disk that syncs at once
STEP = 1 / 1024
"""By so much the outputs of a version are above those of the one before it."""


@dataclass
class Client:
    """Asks for the same answer again and again, over one connection.

    Attributes:
        path: Of the Unix socket.
        versions: How often each version answered.
        faults: Whatever was not as it should be.
    """

    path: str
    versions: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def hammer(self, enough: threading.Event) -> None:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.path)
        tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}
        body = json.dumps({"inputs": [tensor]})
        while not enough.is_set() and not self.faults:
            connection.request("POST", f"/v2/models/{NAME}/infer", body)
            answer = connection.getresponse()
            self._judge(answer.status, answer.read())
        connection.close()

    def _judge(self, status: int, data: bytes) -> None:
        """The bias alone comes out: it says which version computed, and the answer which one says that it did."""
        told = json.loads(data)
        if status != 200:
            self.faults.append(f"{status} {told}")
            return
        version = int(told["model_version"])
        if told["outputs"][0]["data"] != [version * STEP] * 2:
            self.faults.append(f"version {version}: {told['outputs']}")
        self.versions[version] += 1


async def passes(record: UpdateRecord) -> GateVerdict:
    return GateVerdict()


async def swap_to(swaps: Swaps, store: BoardStore, version: int) -> None:
    manifest, parts = linear_release(version)
    await swaps.accept_offer(write_manifest(manifest), offer_of(manifest, soak_s=0.0))
    for digest, data in parts.items():
        store.parts.add(digest, data)
    await swaps.mark_fetched(NAME, f"to-{version}")
    while store.record(NAME).phase != "committed":  # noqa: ASYNC110 - what lies on the disk says nothing
        await asyncio.sleep(0.002)
    assert store.record(NAME).committed == version


async def go_through_swaps(folder: Path, clients: list[Client]) -> None:
    store = BoardStore(folder, reserve_bytes=0)
    settings = InferenceSettings(port=0, socket=clients[0].path, memory_bytes=2048 << 20)
    files = BoardFiles(store, {})
    process = InferenceProcess(settings, files.find, files.select_served())
    swaps = Swaps(SwapContext(store, process, passes, lambda _: None))
    enough = threading.Event()
    async with background(process.run()), background(swaps.run()):
        await process.ready.wait()
        await swap_to(swaps, store, 1)
        hammering = [threading.Thread(target=client.hammer, args=[enough], daemon=True) for client in clients]
        for thread in hammering:
            thread.start()
        try:
            for version in range(2, SWAPS + 2):
                await swap_to(swaps, store, version)
                seen = [sum(client.versions.values()) for client in clients]
                while any(sum(one.versions.values()) == was for one, was in zip(clients, seen, strict=True)):
                    assert not any(client.faults for client in clients), clients
                    await asyncio.sleep(0.002)  # each client has asked this version too
        finally:
            enough.set()
            for thread in hammering:
                await asyncio.to_thread(thread.join)
        assert process.starts == 1


def test_no_request_fails_or_mixes_versions_through_fifty_swaps():
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        clients = [Client(f"{name}/s") for _ in range(CLIENTS)]
        asyncio.run(asyncio.wait_for(go_through_swaps(Path(name), clients), PATIENCE_S))
        versions = BoardStore(Path(name)).versions(NAME)
    assert [client.faults for client in clients] == [[]] * CLIENTS
    assert versions == [SWAPS, SWAPS + 1]
    answered = sum((client.versions for client in clients), Counter[int]())
    assert answered.keys() >= set(range(3, SWAPS + 1))  # every version answered somebody
    assert all(len(client.versions) > SWAPS // 2 for client in clients)
