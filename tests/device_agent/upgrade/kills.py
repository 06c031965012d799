"""Upgrades that are cut off at seeded moments: `python -m tests.device_agent.upgrade.kills FOLDER COUNT SEED`.

The updater is a forked process that kills itself before or after one of its calls that change the disk; or the agent
is killed there, or both are, and the board boots. A moment that comes after the end cuts nothing off, and does not
count. Prints a line of JSON for each; a fault is an AssertionError.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from device_agent.upgrade.record import UpgradeRecord
from tests.device_agent.upgrade.packages import AGENTS, UpgradeBoard

CALLS = ("fsync", "fdatasync", "sync", "rename", "replace", "symlink", "unlink", "mkdir", "killpg")
POINTS = 130
"""Moments of a whole upgrade, about: before and after each of these calls."""
PR_SET_CHILD_SUBREAPER = 36
GUARD_S = 300.0


def main() -> None:
    """Cut off so many upgrades, and say what became of each, and of those that ended before their moment came."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # agents outlive the updater that started them
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    reached, number = 0, 0
    while reached < count:
        random = Random(f"{seed} {number}")
        place = folder / str(number)
        told = cut_off(place, random)
        end_children()
        shutil.rmtree(place)
        sys.stdout.write(json.dumps({"number": number, **told}) + "\n")
        reached, number = reached + told["reached"], number + 1


def end_children() -> None:
    """End whatever a case left running, and wait for it: nothing writes into its folder any more."""
    while True:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                if stat.read_text().rpartition(") ")[2].split()[1] == str(os.getpid()):
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def cut_off(place: Path, random: Random) -> dict[str, Any]:
    """Cut off an upgrade, boot or go on, and look at what is left; return what happened."""
    behaviour = random.choice(("good", "good", "good", *AGENTS))
    cut = random.choice(("updater", "power", "power", "agent"))
    moment = random.randrange(POINTS)
    board = UpgradeBoard(place)
    board.service.start()
    try:
        return look_at(board, (behaviour, cut, moment))
    finally:
        board.service.stop()


def look_at(board: UpgradeBoard, case: tuple[str, str, int]) -> dict[str, Any]:
    """Do it, and assert what must be."""
    behaviour, cut, moment = case
    board.service.running()
    board.fetch("2", behaviour)
    board.want("2", probation_s=0.3 if behaviour == "mute" else 60.0)
    was_reached = run_forked(board, cut, moment)
    if cut == "power" and was_reached:
        board.service.kill()
        board.reboot()
    assert board.current() in ("1", "2")
    record = go_on(board, boots=cut == "power" and was_reached)
    board.service.read_status()  # restarts an agent that was killed after the updater had ended, as systemd does
    running = board.service.running()
    assert record.state in ("committed", "rolled-back"), record
    assert board.current() == running == ("2" if record.state == "committed" else "1"), (record, running)
    assert (record.state == "committed") == (behaviour == "good"), record
    assert (board.home / "updater").readlink().name == running
    assert board.versions() == {"1", running}, board.versions()
    assert not [path for path in board.home.iterdir() if path.name.endswith((".part", ".new", ".gone"))]
    return {"behaviour": behaviour, "cut": cut, "moment": moment, "reached": was_reached, "state": record.state}


def run_forked(board: UpgradeBoard, cut: str, moment: int) -> bool:
    """Upgrade in a process that is cut off; tell whether that moment came."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            arm(board, cut, moment)
            work(board)
            code = 0
        except BaseException:  # noqa: BLE001 - nothing of it may reach the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return (board.folder / "reached").exists()
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def arm(board: UpgradeBoard, cut: str, moment: int) -> None:
    """Have the moment come before or after one of the calls that change the disk."""
    left = [moment]

    def tick() -> None:
        left[0] -= 1
        if left[0] == -1:
            pid = (board.kept / "pid").read_text() if (board.kept / "pid").exists() else ""
            (board.folder / "reached").write_text("")
            if cut == "agent":
                if pid:
                    with suppress(ProcessLookupError):  # it ended by itself, and was reaped
                        true_kill(int(pid), signal.SIGKILL)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*words: Any, **more: Any) -> Any:
            tick()
            found = call(*words, **more)
            tick()
            return found

        return wrapped

    true_kill = os.killpg
    for name in CALLS:
        call = (lambda *_: None) if name.endswith("sync") else getattr(os, name)  # SIGKILL loses no page
        setattr(os, name, counted(call))


def work(board: UpgradeBoard) -> UpgradeRecord:
    """Do what the updater's service does."""
    updater = board.updater()
    updater.resume()
    return asyncio.run(asyncio.wait_for(_finish(board, updater), GUARD_S))


async def _finish(board: UpgradeBoard, updater: Any) -> UpgradeRecord:
    await updater.watch_trial()
    return await updater.install(board.request(updater))


def go_on(board: UpgradeBoard, *, boots: bool) -> UpgradeRecord:
    """Do what a boot does, or a service that is started again: settle, then the agent, then the rest."""
    updater = board.updater()
    updater.resume()
    assert board.current() in ("1", "2")
    if boots and not board.service.is_alive():
        board.service.start()
    return asyncio.run(asyncio.wait_for(_finish(board, updater), GUARD_S))


if __name__ == "__main__":
    main()
