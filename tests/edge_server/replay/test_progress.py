"""A replay that takes long says how far it is."""

from __future__ import annotations

import io

from edge_server.journal.records import RoundClosed, RunClosed
from edge_server.replay.progress import Progress
from tests.naming import names_all


def test_a_line_every_few_seconds_and_none_for_a_quick_replay():
    """Rounds of two seconds and two updates: the third and the sixth one's end are told."""
    out, seconds = io.StringIO(), [0.0]
    progress = Progress(6, out, lambda: seconds[0])
    progress.tell(RunClosed(outcome="finished"), 0.0)
    for number in range(1, 7):
        seconds[0] += 2.0
        progress.tell(RoundClosed(round=number, outcome="aggregated", arrived=("a", "b"), seconds=1.0), 60.0 * number)
    third, sixth = out.getvalue().splitlines()
    assert names_all(third, "3/6", "180 s", 1.0)
    assert names_all(sixth, "6/6", "360 s", 1.0)
