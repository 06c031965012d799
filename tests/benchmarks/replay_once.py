"""Replay a plan once and print the seconds between one round's end and the next one's."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

from shared.runtime.processes import loading

with loading():  # as the command does
    from edge_server.journal.records import AnyRecord, RoundClosed
    from edge_server.replay.run import replay_plan
    from edge_server.rounds.check_plan import load


def main() -> None:
    """Replay what the command line names: a folder, devices, processes."""
    folder, devices, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    marks = []

    def tell(record: AnyRecord, _virtual_s: float) -> None:
        if isinstance(record, RoundClosed):
            marks.append(time.perf_counter())

    replay_plan(load(folder / "plan.toml", folder), folder / "run", devices, workers=workers, tell=tell)
    sys.stdout.write(json.dumps([after - before for before, after in pairwise(marks)]) + "\n")


if __name__ == "__main__":
    main()
