"""Data check subprocess: read and summarise a bounded sample of examples.

`python -m device_agent.commands.diagnosis.data_reader LIMIT [complete]` takes a `Data` as JSON on standard input and
prints the summary as JSON, or the error that would fail a task; LIMIT is the memory limit, 0 for the default.
"""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from device_agent.commands.diagnosis.data_check import COMPLETE, ReadOutcome
from device_agent.projects.environment import adopt_plugins
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime import memory


def read_examples(data: Data, *, complete: bool) -> ReadOutcome:
    """Summarise the examples, or return why they cannot be read.

    Args:
        complete: Whether damaged files are left out, and statistics are returned too.
    """
    try:
        if complete:
            from shared.data.check import check_examples  # noqa: PLC0415 - numpy may be absent

            return ReadOutcome(check=check_examples(data))
        from shared.data.summary import summarise  # noqa: PLC0415 - as above

        summary = summarise(data)
    except ConfigError as error:
        return ReadOutcome(refusal=str(error))
    except MemoryError as error:
        return ReadOutcome(
            refusal=f"out of memory: {error}; raise trainer.memory_mb, or give this board fewer examples"
        )
    except ModuleNotFoundError as error:
        return ReadOutcome(refusal=f"the Python package {error.name!r} is missing; install the training dependencies")
    return ReadOutcome(finding=summary.finding, notes=summary.notes)


def main() -> None:
    """Read the examples and print the outcome."""
    adopt_plugins()
    data = msgspec.json.decode(sys.stdin.buffer.read(), type=Data)
    logging.disable(logging.WARNING)  # the notes repeat them
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with the answer
    memory.limit_data(int(sys.argv[1]) or memory.default_limit())
    memory.prefer_oom_kill()
    with out:
        out.write(msgspec.json.encode(read_examples(data, complete=COMPLETE in sys.argv)))


if __name__ == "__main__":
    main()
