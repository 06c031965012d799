"""Two versions of the project on one machine: the commit before and this checkout, as processes over one broker."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from safetensors import safe_open

from edge_server.plan.removed_keys import REMOVED_KEYS

T = TypeVar("T")

BEFORE = os.environ.get("BEFORE") or "150589d2cdbe8792e017173a56f7943f4ef2dd20"
"""The last commit of the old layout; `make compat BEFORE=...` compares with another one."""

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "device_agent", "edge_server", "firmware_profiles")
PATIENCE_S = 300.0
KILLED_TOGETHER = (signal.SIGSTOP, signal.SIGKILL)
"""Stopped first, so that none of them sees another one die, as in a power cut."""


COMMANDS = """
import contextlib, io, json, runpy, sys
found = []
for sys.argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as written:
        try:
            runpy.run_module("edge_server", run_name="__main__")
        except SystemExit as ended:
            assert ended.code == 0, sys.argv
    found.append(written.getvalue())
print(json.dumps(found))
"""
"""Does what `python -m edge_server` does, once for each list of arguments."""


@dataclass(frozen=True)
class Side:
    """One version of the project.

    Attributes:
        name: `before` or `after`.
        python: The interpreter of its environment.
    """

    name: str
    python: Path
    root: Path

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start its interpreter with its sources as the working directory."""
        command = [str(self.python), *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.Popen(command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, **options)

    def output(self, *arguments: object) -> str:
        """Run its interpreter to the end; return what it wrote, and fail where it does not end with code 0."""
        process = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        written, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{self.name}: {arguments}: {errors.decode()[-2000:]}"
        return written.decode()

    def commands(self, *commands: Sequence[object]) -> list[str]:
        """Run commands of its edge server in one process, which loads torch once; return what each of them wrote."""
        given = json.dumps([["edge-server", *map(str, arguments)] for arguments in commands])
        written: list[str] = json.loads(self.output("-c", COMMANDS, given))
        return written


def after() -> Side:
    """Return this checkout, in the environment that runs the tests."""
    return Side("after", Path(sys.executable), ROOT)


def before(commit: str = BEFORE) -> Side:
    """Export a commit's sources below build/compat and make an environment in which they come first.

    Third-party packages are those of the environment that runs the tests, so that nothing is downloaded and a
    difference of bits cannot come from another torch.
    """
    folder = ROOT / "build" / "compat" / commit
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # several test processes may want it at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sources").exists():
            _export(commit, folder / "sources")
        return Side("before", _environment(folder / "env", folder / "sources"), folder / "sources")


def _export(commit: str, sources: Path) -> None:
    partial = sources.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    assert archive.returncode == 0, f"{archive.stderr.decode()}\nis the clone shallow? git fetch --unshallow"
    subprocess.run(["tar", "-x", "-C", str(partial)], input=archive.stdout, check=True)
    partial.rename(sources)


def _environment(folder: Path, sources: Path) -> Path:
    """Make an environment, unless it is there and of this place; return its interpreter."""
    shared_with = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    paths = "\n".join([str(sources), *(f"import site; site.addsitedir({path!r})" for path in shared_with)])
    python = folder / "bin" / "python"
    if not any(path.read_text() == paths for path in folder.glob("lib/python*/site-packages/before.pth")):
        venv.EnvBuilder(symlinks=True, clear=True).create(folder)
        [packages] = folder.glob("lib/python*/site-packages")
        version = tomllib.loads((sources / "pyproject.toml").read_text())["project"]["version"]
        described = packages / f"fieldfleet-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fieldfleet\nVersion: {version}\n")
        (packages / "before.pth").write_text(paths)
    return python


def until(condition: Callable[[], T], what: str, process: subprocess.Popen[bytes] | None = None) -> T:
    """Wait until something is so, and return it; fail where it takes too long or a process ends meanwhile."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        if found := condition():
            return found
        assert process is None or process.poll() is None, f"{what}: the process ended with code {process.poll()}"
        time.sleep(0.02)
    raise TimeoutError(what)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started: politely, then not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def mosquitto(folder: Path) -> Iterator[int]:
    """Run a private broker on loopback while the block lasts; return its port."""
    program = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    assert program, "mosquitto is not installed; `make setup` does so"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n")
    with (folder / "broker.log").open("ab") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: _listens(port), "the broker", process)
        yield port
    finally:
        end(process)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Site:
    """A broker with devices, whose agents and servers may be of either side.

    Attributes:
        folder: Where its files lie: a folder a device, a folder of runs a plan.
        data: The data section of the devices' files, without the partition.
        partition: Of all devices, without the index.
    """

    folder: Path
    port: int
    devices: tuple[str, ...]
    data: Mapping[str, Any]
    partition: Mapping[str, Any]
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def start_agents(self, side: Side) -> None:
        """Start an agent of that side for every device, in the folders that are there."""
        for index, name in enumerate(self.devices):
            partition = {**self.partition, "parts": len(self.devices), "index": index}
            keys = {"device": name, "site": "lab", "state_dir": str(self.folder / name), "trainer": {"threads": 1}}
            path = self._config(name, data={**self.data, "partition": partition}, **keys)
            self.agents[name] = self._start(side, "device_agent", path)

    def kill_agents(self) -> None:
        """End all agents and their trainers as a power cut does."""
        running = [psutil.Process(agent.pid) for agent in self.agents.values()]
        running += [child for one in running for child in one.children(recursive=True)]
        for number in KILLED_TOGETHER:
            for one in running:
                one.send_signal(number)
        for agent in self.agents.values():
            agent.wait()
        psutil.wait_procs(running)

    def start_server(self, side: Side, plan: str, runs: str) -> subprocess.Popen[bytes]:
        """Start a server of that side on a plan; the same call goes on with an interrupted run."""
        (self.folder / f"{runs}.toml").write_text(plan)
        keys = {
            "plan": f"{runs}.toml",
            "site": "lab",
            "data_dir": str(self.folder / runs),
            "data_root": str(self.folder),
        }
        return self._start(side, "edge_server", self._config(f"server-{runs}", threads=1, **keys))

    def serve(self, side: Side, plan: str, runs: str) -> Path:
        """Run a server of that side on a plan to its end; return the run's folder."""
        assert self.start_server(side, plan, runs).wait(PATIENCE_S) == 0
        return self.run(runs)

    def run(self, runs: str) -> Path:
        """Return the folder of the one run that was begun in a folder of runs."""
        folders = [path.parent for path in (self.folder / runs).glob("*/journal.sqlite")]
        assert len(folders) == 1, f"{folders}: a server began another run where it was to go on with the one there was"
        return folders[0]

    def has_checkpoint(self, runs: str, number: int) -> bool:
        """Say whether the state after a round is stored."""
        return any((self.folder / runs).glob(f"*/checkpoints/round-{number:06d}.safetensors"))

    def close(self) -> None:
        """End everything that was started."""
        self._stack.close()

    def _config(self, name: str, **keys: object) -> Path:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"broker": {"port": self.port}, **keys}))
        return path

    def _start(self, side: Side, module: str, config: Path) -> subprocess.Popen[bytes]:
        with config.with_suffix(".log").open("ab") as log:
            process = side.start("-m", module, "run", "--config", config, stdout=log, stderr=log)
        self._stack.callback(end, process)
        return process


def content(path: Path) -> dict[str, Any]:
    """Return what a file of safetensors holds, bit for bit: its tensors, and the facts beside them."""
    with safe_open(path, framework="np") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        facts = json.loads(file.metadata()["facts"])
    return {"facts": facts, **{key: (str(one.dtype), one.shape, one.tobytes()) for key, one in found.items()}}


def removed_from(place: str) -> set[str]:
    """Return the plan keys that this version removed from the table at a place."""
    table = re.sub(r"\[\d+\]", "[]", place)
    return {key.name for key in REMOVED_KEYS if table.endswith(f".plan.{key.table}")}


def lacking(smaller: Any, larger: Any, place: str = "") -> list[str]:
    """Return where `larger` has not what `smaller` has; it may have keys besides."""
    if isinstance(smaller, dict) and isinstance(larger, dict):
        absent = [f"{place}.{key} is absent" for key in smaller.keys() - larger.keys() - removed_from(place)]
        both = smaller.keys() & larger.keys()
        return absent + [found for key in both for found in lacking(smaller[key], larger[key], f"{place}.{key}")]
    if isinstance(smaller, list) and isinstance(larger, list) and len(smaller) == len(larger):
        pairs = enumerate(zip(smaller, larger, strict=True))
        return [found for index, (one, other) in pairs for found in lacking(one, other, f"{place}[{index}]")]
    return [] if smaller == larger else [f"{place}: {smaller!r} became {larger!r}"]
