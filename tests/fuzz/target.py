"""Fuzz one reader until it has run often or long enough: `python -m tests.fuzz.target NAME STATS [libFuzzer flag …]`.

Our own Python is instrumented branch by branch. msgspec, xxhash, torch and safetensors are compiled, and tomllib is the
interpreter's: there, what a reader says of the bytes (its words, without the numbers in them) stands for the branch
taken.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["shared", "device_agent", "edge_server"]):
    from tests.fuzz.readers import READERS, Reader

SLOTS = 1 << 12
ECHO = re.compile(r"'.*'|\".*\"|`[^$`]*`|\([-\d, ]*\)|0x\w+|\d+", re.DOTALL)
"""What of a reader's words is but a copy of the bytes; as feedback it would make every input look new."""
TOLD_EVERY = 2000
"""Executions between two writings of the figures."""
MEASURED_EVERY = 8
"""Executions of which one is watched for what it allocates, which makes it several times slower."""


def branch() -> Callable[[], None]:
    """Return a function of which atheris sees that it was called."""
    return atheris.instrument_func(lambda: None)


class Target:
    """A reader under fire, and the figures of it."""

    def __init__(self, name: str, reader: Reader, stats: Path) -> None:
        self.name, self.reader, self.stats = name, reader, stats
        self.branches = [branch() for _ in range(SLOTS)]
        self.outcomes: Counter[str] = Counter()
        self.executions = self.peak_bytes = 0
        self.peak_share = 0.0
        self.began = time.perf_counter()

    def __call__(self, data: bytes) -> None:
        """Read one input; what is raised here ends the process and is a finding."""
        words = self.read_measured(data) if self.executions % MEASURED_EVERY == 0 else self.reader.read(data)
        self.executions += 1
        self.outcomes[words.partition(":")[0].partition(",")[0]] += 1
        self.branches[zlib.crc32(ECHO.sub("", words).encode(errors="replace")) % SLOTS]()
        if self.executions % TOLD_EVERY == 0:
            self.tell()

    def read_measured(self, data: bytes) -> str:
        """Read one input; what that allocates at the most is held against the bound.

        A peak above it counts if it comes again and again: now and then the interpreter makes its own tables larger.
        """
        bound = self.reader.bytes_besides + self.reader.bytes_per_byte * len(data)
        for _ in range(3):
            tracemalloc.start()
            words = self.reader.read(data)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            if peak <= bound:
                self.peak_bytes, self.peak_share = max(self.peak_bytes, peak), max(self.peak_share, peak / bound)
                return words
        raise MemoryError(f"{peak} bytes allocated for an input of {len(data)}, at most {bound} may be")

    def tell(self) -> None:
        """Write the figures so far."""
        seconds = time.perf_counter() - self.began
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = {
            "executions": self.executions,
            "per_second": self.executions / seconds,
            "peak_input_bytes": self.peak_bytes,
            "peak_share_of_bound": self.peak_share,
            "peak_process_mib": kib / 1024,
            "outcomes": dict(self.outcomes.most_common()),
        }
        self.stats.write_text(json.dumps(figures))


def main() -> None:
    """Fuzz until libFuzzer has enough."""
    name, stats, *flags = sys.argv[1:]
    reader = READERS[name]
    target = Target(name, reader, Path(stats))

    seeds = reader.seeds()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        """Blind, structured, or structured and from what is accepted: a third of the time each."""
        random = Random(seed)
        match random.randrange(3):
            case 0:
                return atheris.Mutate(data, max_size)
            case 1:
                data = random.choice(seeds)
        return reader.mutate(data, random)[:max_size]

    atheris.Setup([sys.argv[0], *flags], target, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
