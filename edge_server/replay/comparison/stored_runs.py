"""Compare stored runs and their final models, of one site or of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.replay.comparison.compare import Gap, Model, compare_runs
from edge_server.replay.comparison.compare_sites import SitesGap, compare_sites
from edge_server.sites.overview import find_site
from shared.codecs.dense import dense
from shared.errors import CorruptFile
from shared.protocol import payload


def compare_site_runs(recorded: Sequence[StoredRun], replayed: Sequence[StoredRun]) -> Gap | SitesGap:
    """Return the gap between two runs, or the gaps of all sites."""
    if len(recorded) == len(replayed) == 1:
        return gap_between_runs(recorded[0], replayed[0])
    mine, other = ({find_site(run.records, run.folder.name): run for run in runs} for runs in (recorded, replayed))
    gaps = {site: gap_between_runs(mine[site], other[site]) for site in other if site in mine}
    before, after = ({site: run.records for site, run in runs.items()} for runs in (mine, other))
    return compare_sites(before, after, gaps)


def gap_between_runs(recorded: StoredRun, replayed: StoredRun) -> Gap:
    """Return the gap between two runs, including their final models.

    Raises:
        ConfigError: A journal does not contain the beginning of its run.
    """
    model, why = compare_models(recorded, replayed)
    return compare_runs(recorded.records, replayed.records, model, why)


def compare_models(recorded: StoredRun, replayed: StoredRun) -> tuple[Model, str]:
    """Compare the final parameters bit by bit; return the result, and a reason if it is unknown."""
    number, other = (last_model_round(run.records) for run in (recorded, replayed))
    if number != other:
        return "unknown", f"the last model is of round {number}, the replay's of round {other}"
    try:
        digests = {_digest(run.folder, number) for run in (recorded, replayed)}
    except FileNotFoundError as error:
        return "unknown", f"there is no checkpoint {error}"
    except CorruptFile as error:
        return "unknown", str(error)
    return "same" if len(digests) == 1 else "different", ""


def last_model_round(records: Sequence[AnyRecord]) -> int:
    """Return the last round that produced a model; 0 for none."""
    return max((record.round for record in closed_rounds(records) if record.outcome == "aggregated"), default=0)


def _digest(folder: Path, number: int) -> bytes:
    """Return the digest of the payload that carries the parameters after a round to devices."""
    tree = checkpoints.load(folder / "checkpoints", number).tree
    return payload.digest(payload.pack(dense().encode(dict(sorted(tree.items())), None)[0]))
