"""CSV rows of a multi-site plan: per site and combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_server.report.csv_export import UNITS, Line
from edge_server.report.digest import Amount
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest


def csv_site_lines(digest: SitesDigest) -> Iterator[Line]:
    """Yield all values of the sites of a plan."""
    clock = "wall" if digest.live else "virtual"
    runs = {site.site: site.run for site in digest.sites}
    yield Line(digest.name, "", "", "zeta", digest.zeta)
    for site in digest.sites:
        yield from _site(site, clock)
    for mixing in digest.mixings:
        yield from _mixing(digest, runs, mixing, clock)
    for edge in digest.edges:
        name = f"edge.{edge.one}-{edge.other}"
        yield Line(digest.name, "", "", f"{name}.on", edge.on)
        yield Line(digest.name, "", "", f"{name}.off", edge.off)
        yield Line(digest.name, "", "", f"{name}.bytes", edge.bytes, "B")
    for stretch in digest.coordinated:
        text = f"{stretch.coordinator}, term {stretch.term}, rounds {stretch.first} to {stretch.last}"
        yield Line(digest.name, "", "", "coordinated", f"{text}, for {' '.join(stretch.sites)}")
    for name, spreads in digest.given.items():
        for spread in spreads:
            for part in ("least", "median", "most"):
                yield Line(runs[spread.site], spread.round, "", f"given.{name}.{part}", getattr(spread, part))


def _site(site: SiteDigest, clock: str) -> Iterator[Line]:
    yield Line(site.run, "", "", "site", site.site)
    yield _amount(site.run, "", "joules.spent", site.joules, clock)
    allowed = None if site.share_joules is None else site.share_joules + site.moved_joules
    if allowed is not None:
        yield Line(site.run, "", "", "joules.allowed", allowed, "J")
    yield Line(site.run, "", "", "seconds.gossip", site.gossip_s, "s", clock=clock)
    yield Line(site.run, "", "", "seconds.transfer", site.transfer_s, "s", clock=clock)
    yield Line(site.run, "", "", "bytes.gossip_up", site.bytes_up, "B")
    yield Line(site.run, "", "", "bytes.gossip_down", site.bytes_down, "B")
    yield Line(site.run, "", "", "decided_for_others", site.decided)


def _mixing(digest: SitesDigest, runs: Mapping[str, str], mixing: MixingDigest, clock: str) -> Iterator[Line]:
    name = digest.name
    for figure, value in (
        (f"{digest.metric.name}.mean", mixing.mean),
        ("disagreement.before", mixing.before),
        ("disagreement.after", mixing.after),
        ("disagreement.mean_moved", mixing.moved),
    ):
        complete = "no" if value is None else "yes"
        yield Line(name, mixing.round, "", figure, "" if value is None else value, whole=complete)
    yield _amount(name, mixing.round, "seconds.whole", Amount(value=mixing.whole_s), clock)
    yield _amount(name, mixing.round, "joules.whole", mixing.whole_joules, clock)
    for kind, allowed in (("seconds", mixing.allowed_s), ("joules", mixing.allowed_joules)):
        if allowed is not None:
            yield _amount(name, mixing.round, f"{kind}.allowed", Amount(value=allowed), clock)
    for site, seconds in mixing.seconds.items():
        yield Line(runs[site], mixing.round, "", "seconds.gossip", seconds, "s", clock=clock)
    for edge in mixing.off:
        yield Line(name, mixing.round, "", "edge.off", edge)


def _amount(run: str, number: int | str, figure: str, amount: Amount, clock: str) -> Line:
    kind = figure.partition(".")[0]
    value = "" if amount.value is None else amount.value
    complete = "yes" if amount.whole and amount.value is not None else "no"
    clock_column = clock if kind == "seconds" else ""
    return Line(run, number, "", figure, value, UNITS[kind], complete, amount.quality or "", clock_column)
