"""`kill -9` of the agent around swaps: its successor serves a complete version.

A process that does nothing else starts each agent by a fork, and becomes the parent of whatever an agent leaves behind.
The agent is killed at a seeded number of its calls to the disk and to its inference process. Every next one serves at
the same port, and asks there what it serves before it goes on. That process is this file:

    python -m tests.device_agent.inference.test_served_cuts FOLDER PORT SEED KILLS
"""

from __future__ import annotations

import asyncio
import ctypes
import http.client
import json
import os
import signal
import subprocess  # noqa: TID251 - agents that are killed
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from device_agent.exchange.board_releases import BoardFiles
from device_agent.inference.candidate import SwapContext
from device_agent.inference.process import InferenceProcess
from device_agent.inference.settings import InferenceSettings
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.protocol.inference.release import write_manifest
from shared.protocol.update import ENDED, UpdateRecord
from shared.runtime.executor import background, inline
from shared.runtime.file_digest import file_sha256
from tests.device_agent.inference.releases import linear_release, offer_of
from tests.device_agent.inference.test_hammer import STEP, passes
from tests.device_agent.inference.test_power_cuts import ON_DISK
from tests.machine import free_port

NAME = "points"
ASKED = "tests.served_cuts.asked", "tests.served_cuts.answered"
MOST_CALLS, MOST_CALLS_AT_START, AT_START = 200, 20, 4
"""Every so manyeth agent is killed at its start; the others once they have served what they found."""
PR_SET_CHILD_SUBREAPER = 36
MIB = 1 << 20


class CutProcess(InferenceProcess):
    """One at whose messages its agent may be killed."""

    async def request(self, message, kind):
        sys.audit(ASKED[0])
        answer = await super().request(message, kind)
        sys.audit(ASKED[1])
        return answer


def answer(port: int) -> int:
    """Return which version answers; what it makes of zeros, its biases, must be that version's."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}
    connection.request("POST", f"/v2/models/{NAME}/infer", json.dumps({"inputs": [tensor]}))
    found = connection.getresponse()
    told = json.loads(found.read())
    connection.close()
    assert found.status == 200, told
    version = int(told["model_version"])
    assert told["outputs"][0]["data"] == [version * STEP] * 2
    return version


async def live(folder: Path, port: int, calls: Calls) -> None:
    """Be an agent: serve what the record says, look at that, go on with it, then take one version after the other."""
    store = BoardStore(folder, reserve_bytes=0)
    files = BoardFiles(store, {})
    settings = InferenceSettings(port=port, socket=str(folder / "s"), memory_bytes=2048 * MIB)
    process = CutProcess(settings, files.find, files.select_served())
    swaps = Swaps(SwapContext(store, process, passes, lambda _: None, worker=inline, look_s=0.0))
    async with background(process.run()), background(swaps.run()):
        await process.ready.wait()
        assert process.starts == 1, "its port was not free"
        before = store.record(NAME)
        if before.committed:
            assert answer(port) in (before.committed, before.candidate)
        if calls.ends_here:
            return
        calls.count = True
        while True:
            await take_next(swaps, store)


async def take_next(swaps: Swaps, store: BoardStore) -> None:
    record = store.record(NAME)
    version = max(record.candidate + (record.phase in ENDED), 1)
    manifest, parts = linear_release(version)
    told = await swaps.accept_offer(write_manifest(manifest), offer_of(manifest, soak_s=0.0))
    if told.phase == "offered":
        for part in store.parts.missing(manifest).values():
            store.parts.add(part.sha256, parts[part.sha256])
        await swaps.mark_fetched(NAME, told.deployment)
    while store.record(NAME).phase not in ENDED:  # noqa: ASYNC110 - what lies on the disk says nothing
        await asyncio.sleep(0.002)


class Calls:
    """Counts the calls of an agent, which is killed at one of them.

    Attributes:
        left: Until then; 0 for an agent that ends by itself, once it has served.
        count: Whether they count yet.
    """

    def __init__(self, left: int, *, at_start: bool) -> None:
        self.left, self.count, self.ends_here = left, at_start, not left

    def hear(self, event: str, _: object) -> None:
        if self.count and event in (*ON_DISK, *ASKED):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def start(folder: Path, port: int, calls: Calls) -> int:
    """Fork an agent; return how it ended, and let all that it started end too."""
    pid = os.fork()
    if not pid:
        code = 1
        sys.addaudithook(calls.hear)
        try:
            with suppress(KeyboardInterrupt):
                asyncio.run(live(folder, port, calls))
                code = 0
        except BaseException as error:  # noqa: BLE001 - a fork must not go on as the one before it
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    with suppress(ChildProcessError):
        while True:
            orphan, its = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(its)
            assert code in (0, -signal.SIGKILL), f"process {orphan} outlived its agent and ended with {code}"
    return os.waitstatus_to_exitcode(status)


def look(folder: Path, before: UpdateRecord) -> UpdateRecord:
    """Return the record of a board whose agent was killed, if all is well there."""
    store = BoardStore(folder, reserve_bytes=0)
    record = store.record(NAME)
    assert record.committed >= before.committed
    for version in {record.committed, record.serving} - {0}:
        for part in store.manifest(NAME, version).parts.values():
            assert file_sha256(store.parts.path(part.sha256)) == part.sha256
    return record


def main() -> None:
    """Kill so many agents; tell in which phases, and how far they came."""
    folder, port, seed, kills = Path(sys.argv[1]), *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    linear_release(1)  # imports what it needs, before calls to the disk count
    random, phases, record = Random(seed), Counter[str](), UpdateRecord(name=NAME)
    for number in range(kills):
        at_start = number % AT_START == AT_START - 1
        calls = random.randint(1, MOST_CALLS_AT_START if at_start else MOST_CALLS)
        ended = start(folder, port, Calls(calls, at_start=at_start))
        assert ended == -signal.SIGKILL, f"agent {number} ended by itself, with {ended}"
        record = look(folder, record)
        phases[record.phase] += 1
    assert start(folder, port, Calls(0, at_start=False)) == 0
    sys.stdout.write(json.dumps({"phases": phases, "committed": record.committed}) + "\n")


ROOT, MEMORY = Path(__file__).parents[3], Path("/dev/shm")  # noqa: S108 - a disk that syncs at once
KILLS, SEED, PATIENCE_S = 8, 7, 300.0
PARENT = """
import asyncio, sys
from device_agent.inference.process import InferenceProcess
from device_agent.inference.settings import InferenceSettings

async def main():
    process = InferenceProcess(InferenceSettings(port=0, socket=sys.argv[1], memory_bytes=2 << 30), None, {})
    running = asyncio.create_task(process.run())
    await process.ready.wait()
    print(process.pid, flush=True)
    await running

asyncio.run(main())
"""


def test_after_every_cut_a_whole_version_answers_at_the_same_port():
    """Nothing of the agent before is left, or the port would not be free."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        told = map(str, (name, free_port(), SEED, KILLS))
        done = subprocess.run(  # noqa: S603 - ours
            [sys.executable, "-m", "tests.device_agent.inference.test_served_cuts", *told],
            cwd=ROOT,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # it forks
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert sum(found["phases"].values()) == KILLS
    assert found["committed"] >= 1


def test_a_process_that_cannot_look_at_its_input_dies_with_its_agent_too(tmp_path):
    """As one that opens a large model does; here it is stopped."""
    from tests.device_agent.agent_side import is_alive, until  # noqa: PLC0415 - loads torch, which no agent here needs

    with subprocess.Popen(  # noqa: S603 - ours
        [sys.executable, "-c", PARENT, str(tmp_path / "s")], cwd=ROOT, stdout=subprocess.PIPE
    ) as agent:
        pid = int(agent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        agent.kill()
    asyncio.run(until(lambda: not is_alive(pid), 60.0))


if __name__ == "__main__":
    main()
