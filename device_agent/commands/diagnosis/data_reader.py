"""Data check subprocess: read and summarise a bounded sample of examples.

`python -m device_agent.commands.diagnosis.data_reader LIMIT` takes a `Data` as JSON on standard input and prints the
summary as JSON, or the error that would fail a task; LIMIT is the memory limit, 0 for the default.
"""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from device_agent.commands.diagnosis.data_check import ReadOutcome
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime import memory


def summarise_examples(data: Data) -> ReadOutcome:
    """Summarise a bounded sample of the examples, or return why they cannot be read."""
    try:
        from shared.data.summary import summarise  # noqa: PLC0415 - numpy may be absent

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
    data = msgspec.json.decode(sys.stdin.buffer.read(), type=Data)
    logging.disable(logging.WARNING)  # the notes repeat them
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with the answer
    memory.limit_data(int(sys.argv[1]) or memory.default_limit())
    memory.prefer_oom_kill()
    with out:
        out.write(msgspec.json.encode(summarise_examples(data)))


if __name__ == "__main__":
    main()
