"""How far a replay of several sites is from the runs that were recorded at them: each site's gap, and that of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from edge_server.journal.records import AnyRecord
from edge_server.replay.comparison.compare import (
    FIGURES,
    ErrorSpread,
    Gap,
    GapPart,
    Model,
    Pair,
    SkippedFigure,
    error_spread,
)
from edge_server.report.sites.digest import MixingDigest, SitesDigest
from edge_server.report.sites.summarise import digest_sites
from edge_server.report.summarise import digest_run
from shared.errors import ConfigError

Journals: TypeAlias = Mapping[str, Sequence[AnyRecord]]
"""Records of the run of each site."""

OF_ALL: Mapping[str, Callable[[MixingDigest], float | None]] = {
    "whole_s": lambda mixing: mixing.whole_s,
    "mean_accuracy": lambda mixing: mixing.mean,
    "disagreement_before": lambda mixing: mixing.before,
    "disagreement_after": lambda mixing: mixing.after,
}
"""Of all sites together, at the end of each global round; see `edge_server.report.sites.digest`."""


class SitesGap(GapPart, frozen=True, kw_only=True):
    """Recorded runs of several sites and their replay.

    Attributes:
        recorded: What the names of the runs begin with.
        replayed: Likewise of the replay.
        sites: The gap of each site.
        model: Whether the final parameters of all sites are the same bits.
        pairs: Of all together: figures that no site has alone.
        spreads: Of figures of all sites, those of `pairs` last.
        skipped: What was not compared.
    """

    recorded: str
    replayed: str
    sites: dict[str, Gap]
    model: Model
    pairs: list[Pair]
    spreads: list[ErrorSpread]
    skipped: list[SkippedFigure]

    def spread(self, figure: str) -> ErrorSpread | None:
        """Return how the errors of a figure spread over all sites; None where it was not compared."""
        return next((spread for spread in self.spreads if spread.figure == figure), None)


def compare_sites(recorded: Journals, replayed: Journals, gaps: Mapping[str, Gap]) -> SitesGap:
    """Return how far a replay of several sites is from their runs.

    Args:
        recorded: The journals of the runs.
        replayed: Those of the replay.
        gaps: Of each site that is in both.

    Raises:
        ConfigError: The runs are not those of one plan's sites.
    """
    before, after = _digest_all_sites(recorded), _digest_all_sites(replayed)
    pairs = list(_pairs(before, after))
    every = [*(pair for gap in gaps.values() for pair in gap.pairs), *pairs]
    names = [*FIGURES, *OF_ALL]
    alone = sorted(recorded.keys() ^ replayed.keys())
    return SitesGap(
        recorded=before.name,
        replayed=after.name,
        sites=dict(gaps),
        model=_combine_models([gap.model for gap in gaps.values()]),
        pairs=pairs,
        spreads=[
            error_spread(name, matching)
            for name in names
            if (matching := [pair for pair in every if pair.figure == name])
        ],
        skipped=[
            SkippedFigure(what=f"site {site}", why="only recorded" if site in recorded else "only replayed", count=1)
            for site in alone
        ],
    )


def _digest_all_sites(journals: Journals) -> SitesDigest:
    digests = digest_sites([(digest_run(records), records) for records in journals.values()])
    if len(digests) != 1:
        raise ConfigError("the runs are not those of one plan's sites: there is no one run to hold against another")
    return digests[0]


def _combine_models(models: Iterable[Model]) -> Model:
    distinct = set(models)
    return "different" if "different" in distinct else "unknown" if distinct != {"same"} else "same"


def _pairs(before: SitesDigest, after: SitesDigest) -> Iterable[Pair]:
    recorded_mixings, replayed_mixings = (
        {mixing.round: mixing for mixing in digest.mixings} for digest in (before, after)
    )
    for number in sorted(recorded_mixings.keys() & replayed_mixings.keys()):
        for figure, read_figure in OF_ALL.items():
            recorded, replayed = read_figure(recorded_mixings[number]), read_figure(replayed_mixings[number])
            if recorded is not None and replayed is not None:
                yield Pair(figure=figure, round=number, recorded=recorded, replayed=replayed)
