"""Files that a reader visits on three paths: a job in the trainer, an update, a split step.

The processes of a live trial record the calls of our packages by `sys.setprofile`. A path is a period of the trial: a
job of a warm trainer; from the job to the acknowledged update; from a split step to the next. A function counts once,
at its first call; the processes follow one another. A stop is a change of file; returns are stops minus files.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from measure import Figure, Row, told

ROOT, PACKAGES = Path(__file__).parents[2], ("shared", "device_agent", "edge_server")
ROLES = {"device_agent.trainer.main": "trainer", "device_agent": "agent", "edge_server": "server"}
START = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import paths; paths.record()"
DEVICE, ROUNDS, STEPS = "pi-0", 5, 6
SPLITFED = f'name = "splitfed"\noptions = {{ cut = 1, period = {STEPS} }}'
SPLIT = {'name = "fedavg"': SPLITFED, "on_device = true": "", "momentum = 0.9": ""}
Period = tuple[float, float]


class Call(NamedTuple):
    """A call: seconds of the monotonic clock, file and name of the function, and the phase that it logs."""

    at: float
    file: str
    function: str
    phase: str


def record() -> None:
    """Write the calls of this process to a file, if it is the server, or the agent or trainer of `DEVICE`."""
    module, *rest = sys.orig_argv[2:] or [""]
    if module not in ROLES or not (f"/{DEVICE}" in "".join(rest) or (module == "edge_server" and rest[0] == "run")):
        return
    out = (Path(os.environ["CALL_PATHS"]) / ROLES[module]).open("ab", buffering=0)  # whole lines, whichever thread
    packages = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(packages) and code.co_name[0] != "<":
            phase = frame.f_locals["phase"] if code.co_name == "log_phase" else ""
            out.write(f"{time.monotonic()}\t{code.co_filename}\t{code.co_qualname}\t{phase}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


def trace_trial(changes: dict[str, str]) -> dict[str, list[Call]]:
    """Run the demo plan with some of its lines changed; return the calls of each process in order."""
    with tempfile.TemporaryDirectory(prefix="fieldfleet-paths-") as name:
        folder, plan = Path(name), (ROOT / "deploy/plans/demo.toml").read_text()
        for line, other in {"rounds = 10": f"rounds = {ROUNDS}", **changes}.items():
            plan = plan.replace(line, other)
        (folder / "plan.toml").write_text(plan)
        (folder / "sitecustomize.py").write_text(START)
        command = [sys.executable, "-m", "edge_server", "trial", "run", "plan.toml", "--data-dir", str(folder)]
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "CALL_PATHS": str(folder)}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        return {role: sorted(read_calls(folder / role)) for role in ("agent", "trainer", "server")}


def read_calls(path: Path) -> Iterator[Call]:
    """Yield the calls in a file, without an incomplete last line."""
    for line in path.read_text().splitlines():
        if len(row := line.split("\t")) == len(Call._fields):
            yield Call(float(row[0]), row[1], row[2], row[3])


def count_files(processes: Sequence[Sequence[Call]], period: Period) -> tuple[int, int]:
    """Return files and returns of a period."""
    calls = [call for calls in processes for call in calls if period[0] < call.at <= period[1]]
    stops = [file for file, _ in itertools.groupby(file for file, _ in dict.fromkeys(call[1:3] for call in calls))]
    return len(set(stops)), len(stops) - len(set(stops))


def find_phase(calls: Sequence[Call], phase: str, after: float) -> float:
    """Return the next moment at which a process enters a phase."""
    return next(call.at for call in calls if call.phase == phase and call.at > after)


def judge(name: str, processes: Sequence[Sequence[Call]], periods: Sequence[Period], **most: int) -> list[Row]:
    """Return the rows of a path: the median of several periods, which differ by what happens meanwhile."""
    counts = zip(*(count_files(processes, period) for period in periods), strict=True)
    pairs = zip(most.items(), counts, strict=True)
    return [Figure(f"{figure} of {name}", statistics.median(each), "", f"<= {top}") for (figure, top), each in pairs]


def run(*, quick: bool = False) -> Sequence[Row]:
    """Trace a federated and a split trial."""
    del quick  # the plans are small already
    calls = trace_trial({})
    agent, trainer = calls["agent"], calls["trainer"]
    idle = [call.at for call in trainer if call.phase == "idle"][1:ROUNDS]  # the first job builds what others use
    jobs = [(at, find_phase(trainer, "idle", at)) for at in idle]
    begun = [call.at for call in agent if call.phase == "training"][1:ROUNDS]
    updates = [(at, find_phase(agent, "idle", find_phase(agent, "delivering", at))) for at in begun]
    rows = judge("a job in the trainer", [trainer], jobs, files=20, returns=25)
    rows += judge("an update", [agent, trainer, calls["server"]], updates, files=80, returns=200)
    calls = trace_trial(SPLIT)
    at = [call.at for call in calls["trainer"] if call.function == "PipeExchange.__call__"][STEPS:]
    steps = [pair for place, pair in enumerate(itertools.pairwise(at), 1) if place % STEPS]  # within a session
    return rows + judge("a split step", list(calls.values()), steps, files=80, returns=200)


if __name__ == "__main__":
    sys.exit(told(run()))
