"""CSV rows of a multi-site plan: per site and combined."""

from __future__ import annotations

from collections.abc import Iterator

from edge_server.record.amounts import Amount
from edge_server.report.csv_export import Figures, Line, Value, make_line
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest


def csv_site_lines(digest: SitesDigest) -> Iterator[Line]:
    """Yield all values of the sites of a plan."""
    runs = {site.site: site.run for site in digest.sites}

    def lines(run: str, number: int | str, figures: Figures) -> Iterator[Line]:
        return (make_line(run, number, "", name, value, live=digest.live) for name, value in figures)

    yield from lines(digest.name, "", iter([("zeta", digest.zeta)]))
    for site in digest.sites:
        yield from lines(site.run, "", _site_figures(site))
    for mixing in digest.mixings:
        yield from lines(digest.name, mixing.round, _mixing_figures(digest, mixing))
        for name, seconds in mixing.seconds.items():
            yield from lines(runs[name], mixing.round, iter([("seconds.gossip", Amount(value=seconds))]))
        yield from lines(digest.name, mixing.round, (("edge.off", edge) for edge in mixing.off))
    for edge in digest.edges:
        figures: dict[str, Value] = {"on": edge.on, "off": edge.off, "bytes": Amount(value=edge.bytes)}
        prefix = f"edge.{edge.one}-{edge.other}"
        yield from lines(digest.name, "", ((f"{prefix}.{name}", value) for name, value in figures.items()))
    for stretch in digest.coordinated:
        text = f"{stretch.coordinator}, term {stretch.term}, rounds {stretch.first} to {stretch.last}"
        yield from lines(digest.name, "", iter([("coordinated", f"{text}, for {' '.join(stretch.sites)}")]))
    for name, spread in ((name, spread) for name, spreads in digest.given.items() for spread in spreads):
        parts = ("least", "median", "most")
        values = ((f"given.{name}.{part}", getattr(spread, part)) for part in parts)
        yield from lines(runs[spread.site], spread.round, values)


def _site_figures(site: SiteDigest) -> Figures:
    yield "site", site.site
    yield "joules.spent", site.joules
    if site.share_joules is not None:
        yield "joules.allowed", Amount(value=site.share_joules + site.moved_joules)
    yield "seconds.gossip", Amount(value=site.gossip_s)
    yield "seconds.transfer", Amount(value=site.transfer_s)
    yield "bytes.gossip_up", Amount(value=site.bytes_up)
    yield "bytes.gossip_down", Amount(value=site.bytes_down)
    yield "decided_for_others", site.decided


def _mixing_figures(digest: SitesDigest, mixing: MixingDigest) -> Figures:
    yield f"{digest.metric.name}.mean", mixing.mean
    yield "disagreement.before", mixing.before
    yield "disagreement.after", mixing.after
    yield "disagreement.mean_moved", mixing.moved
    yield "seconds.whole", Amount(value=mixing.whole_s)
    yield "joules.whole", mixing.whole_joules
    for kind, allowed in (("seconds", mixing.allowed_s), ("joules", mixing.allowed_joules)):
        if allowed is not None:
            yield f"{kind}.allowed", Amount(value=allowed)
