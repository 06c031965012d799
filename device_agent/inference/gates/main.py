"""Run the gates of one release: the job comes as JSON on standard input, a line a word goes out on standard output."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from device_agent.inference.candidate import GateVerdict
from device_agent.inference.gates.process import AnyJob, FromGates, OwnJob
from shared.runtime import processes

NICER = 10


def main() -> None:
    """Try the release out; say what becomes of it."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    job: AnyJob = msgspec.json.decode(sys.stdin.buffer.read(), type=AnyJob)
    processes.configure(job.settings.log_level)
    processes.end_on_thread_failure()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the words
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = job.settings.memory_bytes if hard == resource.RLIM_INFINITY else min(job.settings.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))  # of the models alone: reading examples may take more
    try:
        from device_agent.inference.gates import judgement  # noqa: PLC0415 - where it is not installed, that is to be said
    except ImportError as error:
        say(out, GateVerdict(reason=f"runtime: {error}; install fieldfleet with its extra for boards", lasting=False))
        return
    if isinstance(job, OwnJob):
        os.nice(NICER)  # what answers meanwhile, and training, go before
        lift_limit()
        say(out, judgement.try_own(job))
    else:
        say(out, judgement.try_out(job, lambda word: say(out, word), lift_limit))


def say(out: BinaryIO, word: FromGates) -> None:
    """Write a word to the agent; one that is gone needs none."""
    try:
        out.write(msgspec.json.encode(word) + b"\n")
    except BrokenPipeError:
        sys.exit(0)


def lift_limit() -> None:
    """Let this process take more memory than the one that serves may."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    main()
