"""JSON export of digests; the tasks of a run are written a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from edge_server.journal.rollouts.state import RolloutState, summarise
from edge_server.report.digest import Digest
from edge_server.report.sites.digest import SitesDigest
from edge_server.report.targets import costs_to_targets

SCHEMA = 1
"""Version of the JSON: `runs` are of `edge_server.report.digest`, `sites` of `edge_server.report.sites.digest`,
`targets` of `edge_server.report.targets.CostToTarget`."""
BLOCK = 256
END_OF_RUN = "]}"
"""A run ends with the list of its tasks."""


def json_text(
    runs: Sequence[Digest],
    targets: Sequence[float] = (),
    rollouts: Sequence[RolloutState] = (),
    sites: Sequence[SitesDigest] = (),
) -> Iterator[str]:
    """Yield the parts of the JSON document."""
    yield f'{{"schema":{SCHEMA},"runs":['
    for place, run in enumerate(runs):
        yield "," * bool(place) + _encode(msgspec.structs.replace(run, tasks=[])).removesuffix(END_OF_RUN)
        tasks, comma = iter(run.tasks), ""
        while block := list(islice(tasks, BLOCK)):
            yield comma + _encode(block)[1:-1]
            comma = ","
        yield END_OF_RUN
    more = {"targets": costs_to_targets(runs, targets), "sites": sites, "rollouts": list(map(summarise, rollouts))}
    yield "]," + _encode({name: values for name, values in more.items() if values or name == "targets"})[1:] + "\n"


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
