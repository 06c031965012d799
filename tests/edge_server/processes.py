"""Our commands as processes: started and ended one by one, with what they write to look at."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import subprocess  # noqa: TID251 - the system is processes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from runpy import run_module
from threading import Timer
from typing import Any, NamedTuple

import msgspec
import pytest

from edge_server.__main__ import main
from edge_server.journal.records import AnyRecord, RoundClosed, RunClosed, RunOpened, UpdateAccepted, closed_rounds
from edge_server.journal.runs import checkpoint_path
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared.tensors import file
from shared.tensors.tree import State
from tests.edge_server.gateway.sites import LiveSite, make_site
from tests.edge_server.harness import write_plan
from tests.edge_server.textbook import require_equal

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
ROUNDS = 6
TINY = {
    "model": 'name = "mlp"\noptions = { features = 64, hidden = 8, classes = 10 }',
    "data": 'source = "digits"\nlimit = 120\nholdout = 0.1',
    "evaluation": "every = 1\non_device = true",
    "more": '[partition]\nkind = "even"',
}
DEVICES = '[[device]]\nname = "a"\n[[device]]\nname = "b"'


def called(*arguments: object) -> int:
    """Run the command line in this process; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["edge-server", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


class Ended(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def captured(*arguments: object, limit_s: float = PATIENCE_S) -> Ended:
    """Run the command line in this process, as Ctrl-C would end it after the limit; return what came of it."""
    guard, umask = Timer(limit_s, os.kill, (os.getpid(), signal.SIGINT)), os.umask(0o022)
    guard.start()
    try:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            code = called(*arguments)
    finally:
        guard.cancel()
        os.umask(umask)
    return Ended(code, out.getvalue(), err.getvalue())


@contextmanager
def started(module: str, *arguments: object, log: Path, cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of our commands in a session of its own; it is gone after the block."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - ours
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Forked:
    """A forked process, with what is asked of a started one."""

    process: ForkServerProcess

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def poll(self) -> int | None:
        """Return its exit code, minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end; return its exit code."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise TimeoutError(f"process {self.pid} does not end")
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.terminate()


@contextmanager
def forked(*arguments: object, log: Path, cwd: Path = ROOT, module: str = "edge_server") -> Iterator[Forked]:
    """Run a command of the server in a process like any other, but born with torch: importing it takes seconds of CPU.

    It is a child of a process that does nothing but import and fork. Of the tests it inherits the import path alone:
    environment variables are those of the first call.
    """
    log.touch()  # a started process has one at once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "edge_server.trial.live"])
    process = Forked(context.Process(target=_serve, args=(module, [*map(str, arguments)], log, cwd)))
    process.process.start()
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.process.join(60)
            process.kill()
        process.process.join()


def _serve(module: str, arguments: list[str], log: Path, cwd: Path) -> None:
    """Be `python -m module`, in a session of its own."""
    gc.freeze()
    os.setsid()
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))  # as `python -m` does
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = [module, *arguments]
    run_module(module, run_name="__main__", alter_sys=True)


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait for something to be so; return it."""
    limit = time.monotonic() + patience_s
    while time.monotonic() < limit:
        if found := condition():
            return found
        time.sleep(0.02)  # noqa: TID251 - waits for other processes
    raise TimeoutError(what)


def folder_of(runs: Path) -> Path:
    """Return the folder of the one run there is."""
    [journal] = runs.glob(f"*/{JOURNAL}")
    return journal.parent


def final(folder: Path, number: int) -> dict[str, Any]:
    """Return the parameters a run ended with."""
    return file.load(checkpoint_path(folder / "checkpoints", number)).tree


@dataclass
class Fleet:
    """A site with agents a and b as processes: they wait for whatever server comes.

    Everybody has a certificate of the site's, and its broker its access list.
    """

    folder: Path
    runner: asyncio.Runner
    site: LiveSite
    data: str
    more: dict[str, dict[str, object]] = field(default_factory=dict)
    brokers: dict[str, object] = field(default_factory=dict)
    agents: dict[str, ExitStack] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, object]:
        """What a server's file says of the broker."""
        told: dict[str, object] = msgspec.to_builtins(self.site.for_server())
        return told

    def config(self, path: Path, **keys: object) -> Path:
        """Write a file for a process: a server's, unless its broker is given."""
        path.write_text(json.dumps({"broker": self.own, "site": "lab", **keys}))
        return path

    def agent(self, name: str) -> None:
        """Start an agent on its half of the examples that every plan here has."""
        sections = TINY | {"data": self.data, "more": f"{TINY['more']}\n{DEVICES}"}
        plan = load(write_plan(self.folder, **sections), self.folder)
        data = msgspec.to_builtins(device_data(plan, plan.device, "ab".index(name)))
        keys = {
            "device": name,
            "site": "lab",
            "state_dir": str(self.folder / name),
            "data": data,
            "trainer": {"threads": 1},
        }
        keys["log_level"] = "debug"  # what its trainer does is seen there alone
        keys |= {"broker": self.brokers.setdefault(name, msgspec.to_builtins(self.site.for_board(name)))}
        keys |= self.more.get(name, {})
        self.agents[name] = stack = ExitStack()
        path = self.config(self.folder / f"{name}.json", **keys)
        self.processes[name] = stack.enter_context(started("device_agent", "run", "--config", path, log=self.log(name)))

    def log(self, name: str) -> Path:
        """Return the file that an agent writes to."""
        return self.folder / f"{name}.log"

    def kill_agent(self, name: str) -> None:
        """End an agent as a power cut does; its trainer, a process of its own, is not told."""
        self.processes[name].kill()
        self.agents[name].close()

    def replace_broker(self) -> None:
        """End the broker as a power cut does, and start one that remembers nothing."""
        assert self.site.process
        self.site.process.kill()
        self.runner.run(self.site.stop())
        self.runner.run(self.site.start())


@dataclass
class Field:
    """A fleet, and a folder whose servers come and go, each for a run of one plan."""

    fleet: Fleet
    folder: Path
    rounds = ROUNDS
    log_level = "info"
    _replayed: dict[bytes, tuple[State, list[AnyRecord]]] = field(default_factory=dict)

    def sections(self) -> dict[str, str]:
        """Return what the plan has beside or in place of `TINY`; its rounds take long enough to be cut."""
        return {"hyper": "local_epochs = 30\nbatch_size = 8\nlearning_rate = 0.1", "evaluation": "every = 1"}

    def plan(self, name: str) -> Plan:
        """Write the plan of a run; return it as the server reads it."""
        usual = TINY | {"data": self.fleet.data, "more": f"{TINY['more']}\n{DEVICES}"}
        path = write_plan(self.folder, rounds=self.rounds, **usual | self.sections())
        return load(path.rename(self.folder / f"{name}.toml"), self.folder)

    def server(self, name: str) -> AbstractContextManager[Forked]:
        """Start a server on a plan, always by the same command."""
        self.plan(name)
        places = {"data_dir": str(self.folder / name), "data_root": str(self.folder)}
        keys = {"plan": f"{name}.toml", "site": "lab", "threads": 1, "log_level": self.log_level, **places}
        path = self.fleet.config(self.folder / f"server-{name}.json", **keys)
        return forked("run", "--config", path, log=self.folder / f"server-{name}.log")

    def records(self, name: str) -> list[AnyRecord]:
        """Return what the server has written."""
        folders = [path.parent for path in (self.folder / name).glob(f"*/{JOURNAL}")]
        assert len(folders) <= 1, "another run was begun"
        return read_records(folders[0]) if folders else []

    def reached(self, name: str, number: int, kind: type[AnyRecord] = RoundClosed) -> bool:
        """Tell whether a record of that round is written."""
        return any(isinstance(one, kind) and one.round >= number for one in self.records(name))

    def require_whole(self, name: str) -> None:
        """Check that a run is as if nothing had happened: every round, every update once, the replay's bits."""
        records, plan = self.records(name), self.plan(name)
        assert [(one.round, one.arrived) for one in closed_rounds(records)] == [
            (number, ("a", "b")) for number in range(1, self.rounds + 1)
        ]
        accepted = [(one.device, one.round) for one in records if isinstance(one, UpdateAccepted)]
        assert len(accepted) == len(set(accepted)) == 2 * self.rounds
        assert [type(one) for one in records if isinstance(one, RunOpened | RunClosed)] == [RunOpened, RunClosed]
        folder = folder_of(self.folder / name)
        require_equal(final(folder, self.rounds), self.replayed(name, plan)[0].tree)

    def replayed(self, name: str, plan: Plan) -> tuple[State, list[AnyRecord]]:
        """Return the end and the records of a plan's replay: the same for whatever was killed meanwhile."""
        key = msgspec.msgpack.encode(plan)
        if key not in self._replayed:
            self._replayed[key] = replay_plan(plan, self.folder / f"replay-{name}", 2)
        return self._replayed[key]


@contextmanager
def waiting(folder: Path, data: str = TINY["data"], **more: dict[str, object]) -> Iterator[Fleet]:
    """Run a site with two agents that wait for a server, while the block lasts; nothing that anybody says is refused.

    Args:
        data: A plan's section.
        **more: What else an agent's file says, by its name.
    """
    with asyncio.Runner() as runner:
        site = make_site(folder, "lab")
        site.tell_refusals()
        runner.run(site.start())
        here = Fleet(folder, runner, site, data, more)
        for name in "ab":
            here.agent(name)
        try:
            yield here
        finally:
            for name in "ab":
                here.agents[name].close()
            runner.run(site.stop())
        assert site.refusals() == []
