"""`kill -9` of the agent at 100 random points of release swaps.

A process that does nothing else starts each agent by a fork, which costs milliseconds. The agent is killed at a seeded
number of the calls by which it reads and writes its disk, so that a run can be repeated. That process is this file:

    python -m tests.device_agent.inference.test_power_cuts FOLDER SEED KILLS
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess  # noqa: TID251 - agents that are killed
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from device_agent.inference.candidate import GateVerdict, SwapContext
from device_agent.inference.messages import Figures
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.errors import ServingRefused
from shared.protocol.inference.release import write_manifest
from shared.protocol.update import ENDED, PENDING, UpdateRecord
from shared.runtime.executor import background, inline
from shared.runtime.file_digest import file_sha256
from tests.device_agent.inference.releases import MemoryServing, light_release, offer_of

NAME = "digits"
REFUSED, WORSE = 5, 4
"""Every version that these divide fails a gate, or does worse in its trial."""
MOST_CALLS = 400
ON_DISK = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.scandir", "os.listdir")


class FileServing(MemoryServing):
    """Loads what lies on the board, if it is whole."""

    store: BoardStore

    async def load(self, name: str, version: int) -> None:
        if not is_whole(self.store, version):
            raise ServingRefused(f"version {version} is not whole")
        await super().load(name, version)


def is_whole(store: BoardStore, version: int) -> bool:
    """Tell whether all files of a version are there and have their digests."""
    parts = store.manifest(NAME, version).parts.values()
    return all(file_sha256(store.parts.path(part.sha256)) == part.sha256 for part in parts)


async def gate(record: UpdateRecord) -> GateVerdict:
    return GateVerdict(reason="" if record.candidate % REFUSED else "accuracy: a fifth of all are poor")


async def live(folder: Path) -> None:
    """Be an agent: serve what the record says, go on with it, then take one version after the other."""
    store = BoardStore(folder, reserve_bytes=0)
    serving = FileServing()
    serving.store = store
    record = store.record(NAME)
    for version in sorted({record.committed, record.serving} - {0}):
        await serving.load(NAME, version)
        await serving.switch(NAME, version)
    around = SwapContext(store, serving, gate, lambda _: None, worker=inline, look_s=0.0)
    swap = Swaps(around)
    async with background(swap.run()):
        while True:
            record = store.record(NAME)
            version = max(record.candidate + (record.phase in ENDED), 1)
            if version % WORSE == 0:
                serving.figures_of[version] = Figures(NAME, version, 10, 10)
            await offer(swap, store, version)
            while store.record(NAME).phase not in ENDED:  # noqa: ASYNC110 - what lies on the disk says nothing
                await asyncio.sleep(0)
            assert serving.current.get(NAME, 0) == store.record(NAME).committed


async def offer(swap: Swaps, store: BoardStore, version: int) -> None:
    manifest, parts = light_release(NAME, version)
    told = await swap.accept_offer(write_manifest(manifest), offer_of(manifest, soak_s=0.0))
    if told.phase == "offered":
        for part in store.parts.missing(manifest).values():
            store.parts.add(part.sha256, parts[part.sha256])
        await swap.mark_fetched(NAME, told.deployment)


def be_killed(folder: Path, calls: int) -> None:
    """Live until the disk was asked for something so often; a fault of ours ends it otherwise."""
    left = calls

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in ON_DISK:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        asyncio.run(live(folder))
    finally:
        os._exit(1)


def look(store: BoardStore, before: UpdateRecord) -> UpdateRecord:
    """Return the record of a board whose agent was killed, if all is well there."""
    record = store.record(NAME)
    for version in {record.committed, record.serving, record.previous} - {0}:
        assert is_whole(store, version), f"version {version} is not whole: {record}"
    assert record.committed >= before.committed, f"{before}, then {record}"
    assert not record.committed or (record.committed % REFUSED and record.committed % WORSE), f"a bad one: {record}"
    if record.phase not in PENDING:
        assert len(store.versions(NAME)) <= 4, store.versions(NAME)  # those two, and what was not yet removed
    return record


def main() -> None:
    """Kill so many agents; tell in which phases, and how far they came."""
    folder, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    random, store, phases = Random(seed), BoardStore(folder, reserve_bytes=0), Counter[str]()
    record = UpdateRecord(name=NAME)
    for number in range(kills):
        calls = random.randint(1, MOST_CALLS)
        pid = os.fork()
        if not pid:
            with suppress(KeyboardInterrupt):
                be_killed(folder, calls)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"agent {number} ended by itself"
        assert os.WTERMSIG(status) == signal.SIGKILL
        record = look(store, record)
        phases[record.phase] += 1
    told = {"phases": phases, "committed": record.committed, "offered": record.candidate}
    sys.stdout.write(json.dumps(told) + "\n")


ROOT, MEMORY = Path(__file__).parents[3], Path("/dev/shm")  # noqa: S108 - a disk that syncs at once
KILLS, SEED = 100, 20


@pytest.fixture
def board(tmp_path) -> Iterator[Path]:
    """Return a folder, of memory where there is such a disk: what counts here is the order of calls."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as name:
        yield Path(name)


def test_a_working_version_outlives_every_power_cut(board):
    """Good versions, poor ones that a gate refuses, and bad ones that go back from their trial."""
    command = [sys.executable, "-m", "tests.device_agent.inference.test_power_cuts", str(board), str(SEED), str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert sum(told["phases"].values()) == KILLS
    assert told["offered"] >= told["committed"] > KILLS // 10  # it went on all the time
    assert {"offered", "fetched", "verified", "staged", "trial", "committed"} <= told["phases"].keys()


if __name__ == "__main__":
    main()
