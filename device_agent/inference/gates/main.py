"""Process that runs a release's acceptance gates: JSON in, JSON lines out."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from device_agent.inference.candidate import GateVerdict
from device_agent.inference.gates.process import AnyJob, FromGates, OwnJob
from device_agent.projects.environment import adopt_plugins
from shared.runtime import processes

NICE_INCREMENT = 10


def main() -> None:
    """Run the gates on a release and send the verdict."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    job: AnyJob = msgspec.json.decode(sys.stdin.buffer.read(), type=AnyJob)
    adopt_plugins(job.projects)
    processes.configure(job.settings.log_level)
    processes.end_on_thread_failure()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep output of libraries out of the messages
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = job.settings.memory_bytes if hard == resource.RLIM_INFINITY else min(job.settings.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))  # for the models; lifted before examples are read
    try:
        from device_agent.inference.gates import judgement  # noqa: PLC0415 - report if its packages are not installed
    except ImportError as error:
        send(out, GateVerdict(reason=f"runtime: {error}; install fieldfleet with its extra for boards", lasting=False))
        return
    if isinstance(job, OwnJob):
        os.nice(NICE_INCREMENT)  # serving and training come first
        lift_limit()
        send(out, judgement.compare_own_model(job))
    else:
        send(out, judgement.run_gates(job, lambda message: send(out, message), lift_limit))


def send(out: BinaryIO, message: FromGates) -> None:
    """Send a message to the agent; exit if the agent is gone."""
    try:
        out.write(msgspec.json.encode(message) + b"\n")
    except BrokenPipeError:
        sys.exit(0)


def lift_limit() -> None:
    """Raise this process's memory limit above the serving process's."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    main()
