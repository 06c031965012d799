"""Compare the replay of several sites with their recorded runs, per site and overall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from edge_server.journal.records import AnyRecord
from edge_server.replay.comparison.compare import (
    Entries,
    Entry,
    ErrorSpread,
    Gap,
    GapPart,
    Model,
    Pair,
    SkippedFigure,
    error_spreads,
    join_entries,
    ordered_figures,
)
from edge_server.report.sites.digest import SitesDigest
from edge_server.report.sites.summarise import digest_sites
from edge_server.report.summarise import digest_run
from shared.errors import ConfigError

Journals: TypeAlias = Mapping[str, Sequence[AnyRecord]]
"""Records by site."""

OF_ALL: Mapping[str, str] = {
    "whole_s": "whole_s",
    "mean_accuracy": "mean",
    "disagreement_before": "before",
    "disagreement_after": "after",
}
"""Figures over all sites at the end of each global round, by their place in `MixingDigest`."""


class SitesGap(GapPart, frozen=True, kw_only=True):
    """Difference between the recorded runs of several sites and their replay.

    Attributes:
        recorded, replayed: Common prefixes of the runs' names.
        model: Whether the final parameters of all sites have identical bits.
        pairs: Figures over all sites; `spreads` are of these and those of each site.
    """

    recorded: str
    replayed: str
    sites: dict[str, Gap]
    model: Model
    pairs: list[Pair]
    spreads: list[ErrorSpread]
    skipped: list[SkippedFigure]


def compare_sites(recorded: Journals, replayed: Journals, gaps: Mapping[str, Gap]) -> SitesGap:
    """Compare a replay of several sites with their recorded runs; `gaps` has each site that is in both.

    Raises:
        ConfigError: The runs do not belong to the sites of one plan.
    """
    before, after = _digest_all_sites(recorded), _digest_all_sites(replayed)
    entries = [_entries(digest, before.metric.name) for digest in (before, after)]
    pairs = list(join_entries("round", entries, Counter()))
    every = [*(pair for gap in gaps.values() for pair in gap.pairs), *pairs]
    alone = sorted(recorded.keys() ^ replayed.keys())
    return SitesGap(
        recorded=before.name,
        replayed=after.name,
        sites=dict(gaps),
        model=_combine_models([gap.model for gap in gaps.values()]),
        pairs=pairs,
        spreads=error_spreads(every, ordered_figures(every, tuple(OF_ALL))),
        skipped=[
            SkippedFigure(what=f"site {site}", why="only recorded" if site in recorded else "only replayed", count=1)
            for site in alone
        ],
    )


def _digest_all_sites(journals: Journals) -> SitesDigest:
    digests = digest_sites([(digest_run(records), records) for records in journals.values()])
    if len(digests) != 1:
        raise ConfigError("the runs do not belong to the sites of one plan; compare the runs of all sites of one plan")
    return digests[0]


def _combine_models(models: Iterable[Model]) -> Model:
    distinct = set(models)
    return "different" if "different" in distinct else "unknown" if distinct != {"same"} else "same"


def _entries(digest: SitesDigest, metric: str) -> Entries:
    names = {f"mean_{metric}" if figure == "mean_accuracy" else figure: field for figure, field in OF_ALL.items()}
    return {
        (mixing.round, ""): Entry("", {figure: getattr(mixing, field) for figure, field in names.items()})
        for mixing in digest.mixings
    }
