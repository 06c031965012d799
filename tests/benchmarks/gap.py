"""A live run behind slow links, recorded, exported, replayed, compared: `make bench NAME=gap`, as root, two minutes.

Four agents with real trainers, each in a network namespace whose link passes 2 to 20 Mbit/s and in a control group that
gets 25 to 100 % of a core; mosquitto; `edge-server run`. The trace of it goes through `edge-server replay --compare`.
Payloads must be the same bits; how many frames they are cut into follows the pace of the link, so that of frames a few
headers of 36 bytes may be more or fewer, which is told.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu
import msgspec
import netns
from measure import Figure, NotRun, Row

from edge_server.fleet.broker import find_mosquitto
from edge_server.plan.data import device_data
from edge_server.plan.plan import devices
from edge_server.replay.comparison.compare import Gap
from edge_server.replay.comparison.compare_text import lines, table
from edge_server.rounds.check_plan import load
from shared.runtime.text_table import write_text

ROUNDS, HIDDEN = int(os.environ.get("ROUNDS", "6")), int(os.environ.get("HIDDEN", "4000"))
PATIENCE_S = 400.0
MOST_OFF = 0.1
KEEP = os.environ.get("KEEP", "")
"""A folder for the run, the trace and the page; empty for one that is gone afterwards."""


@dataclass(frozen=True)
class Board:
    """A device: what its link passes, and what share of a core it has."""

    name: str
    mbit: int
    share: float


BOARDS = (Board("near", 20, 0.25), Board("porch", 10, 0.5), Board("roof", 5, 1.0), Board("field", 2, 1.0))
QUICK = 2, 200
PLAN = """
name = "gap"
rounds = {rounds}
seed = 1
[algorithm]
name = "fedavg"
[model]
name = "mlp"
options = {{ features = 64, hidden = {hidden}, classes = 10 }}
[hyper]
local_epochs = 20
batch_size = 16
learning_rate = 0.05
[cohort]
min_devices = {count}
[round]
deadline_s = 120
[data]
source = "digits"
[partition]
kind = "even"
{devices}
"""


def text_of(rounds: int, hidden: int) -> str:
    """Return the plan of a run of all boards."""
    named = "".join(f'[[device]]\nname = "{board.name}"\n' for board in BOARDS)
    return PLAN.format(rounds=rounds, hidden=hidden, count=len(BOARDS), devices=named)


@dataclass
class Site:
    """A gateway and its boards, each process with a file of its own for what it says."""

    folder: Path
    stack: ExitStack

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process; it is ended with the site."""
        output = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        self.stack.callback(_end, process)
        return process

    def ours(self, module: str, name: str, keys: Mapping[str, Any]) -> list[str]:
        """Return one of our commands with its file written."""
        path = self.folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(keys))
        return [sys.executable, "-m", module, "run", "--config", str(path)]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=30)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def limited(number: int, share_of_core: float) -> Iterator[list[str]]:
    """Yield what to put before a command so that it and its children get that much of one core."""
    with cpu.group(number) as group:
        group.limit(share_of_core)
        yield ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.folder / "cgroup.procs")]


def live(folder: Path, boards: Sequence[Board] = BOARDS, *, text: str, burst: str = netns.BURST) -> Path:
    """Run a plan with all boards; return the run's folder."""
    (folder / "plan.toml").write_text(text)
    plan, port = load(folder / "plan.toml", folder), _free_port()
    fleet = devices(plan)
    with ExitStack() as stack:
        links = [
            stack.enter_context(netns.slow_link(f"{one.mbit}mbit", at, burst=burst)) for at, one in enumerate(boards)
        ]
        before = [stack.enter_context(limited(at, one.share)) for at, one in enumerate(boards)]
        site = Site(folder, stack)
        listeners = "".join(f"listener {port} {address}\n" for address in ("127.0.0.1", *(x.address for x in links)))
        conf = folder / "mosquitto.conf"
        said = "allow_anonymous true\nset_tcp_nodelay true\npersistence false\nmax_packet_size 8388608\n"
        conf.write_text(listeners + said)
        site.start("broker", [str(find_mosquitto()), "-c", str(conf)])
        time.sleep(0.5)
        keys = {
            "plan": "plan.toml",
            "site": "lab",
            "run": "live",
            "data_dir": str(folder / "runs"),
            "data_root": str(folder),
        }
        broker = {"broker": {"host": "127.0.0.1", "port": port}}
        server = site.start("server", site.ours("edge_server", "server", {**keys, "threads": 1, **broker}))
        agents = []
        for at, (board, link) in enumerate(zip(boards, links, strict=True)):
            agent = {
                "device": board.name,
                "site": "lab",
                "state_dir": str(folder / board.name),
                "data": device_data(plan, fleet, at),
                "broker": {"host": link.address, "port": port},
                "trainer": {"threads": 1},
            }
            command = [*before[at], *link.prefix, *site.ours("device_agent", board.name, agent)]
            agents.append(site.start(board.name, command))
        _until_ended(server, agents)
    return folder / "runs" / "live"


def _until_ended(server: subprocess.Popen[bytes], agents: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + PATIENCE_S
    while server.poll() is None:
        if time.monotonic() > until or any(agent.poll() is not None for agent in agents):
            raise RuntimeError("an agent has ended, or the run does not; KEEP=DIR keeps what they wrote")
        time.sleep(0.2)
    if server.returncode:
        raise RuntimeError("the run did not end well; KEEP=DIR keeps what the server wrote")


def replayed(folder: Path) -> tuple[Gap, float]:
    """Export the run, replay its trace, compare; return the gap and the seconds that the replay took."""
    _edge_server(folder, "trace", "export", "live", "--out", "trace")
    began = time.monotonic()
    places = ("--compare", "live", "--html", "gap.html", "--format", "json")
    told = _edge_server(folder, "replay", "trace", *places)
    return msgspec.json.decode(told, type=Gap), time.monotonic() - began


def _edge_server(folder: Path, *arguments: str) -> bytes:
    command = [sys.executable, "-m", "edge_server", *arguments, "--data-dir", "runs", "--data-root", "."]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True).stdout


def lack() -> str:
    """Return what no board can be made without here; empty where one can."""
    return netns.lack() or cpu.lack()


def run(*, quick: bool = False) -> list[Row]:
    """Make the run, its trace and its replay."""
    if reason := lack():
        return [NotRun("gap", reason)]
    rounds, hidden = QUICK if quick else (ROUNDS, HIDDEN)
    with tempfile.TemporaryDirectory(prefix="gap-") as name:
        folder = Path(KEEP or name)
        folder.mkdir(parents=True, exist_ok=True)
        recorded = live(folder, text=text_of(rounds, hidden))
        found, took_s = replayed(folder)
    write_text(sys.stdout, [table(found.spreads), *lines(found)])
    live_s = sum(one.recorded for one in found.pairs if one.figure == "round_s")
    other = 2 * rounds * len(BOARDS) - found.updates.same - found.starts.same
    frames = [one for one in found.spreads if one.figure in ("bytes_up", "bytes_down")]
    return [
        Figure(f"gap, {recorded.name}: rounds took in all", live_s, "s"),
        Figure("gap: the replay took", took_s, "s"),
        Figure("gap: median error of round time", 100 * found.spread("round_s").median, "%", f"<= {100 * MOST_OFF:g}"),
        Figure("gap: payloads that are not the same bits", other, "", "<= 0"),
        Figure("gap: frame bytes, largest error", 100 * max(one.most for one in frames), "%"),
        Figure("gap: model is not the same bits", float(found.model != "same"), "", "<= 0"),
    ]
