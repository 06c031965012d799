"""What sites came to together as lines of the CSV: of a site's run, or of all under their common name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_server.report.csv_export import UNITS, Line
from edge_server.report.digest import Amount
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest


def site_lines(found: SitesDigest) -> Iterator[Line]:
    """Yield all figures of sites that belong together."""
    clock = "wall" if found.live else "virtual"
    runs = {one.site: one.run for one in found.sites}
    yield Line(found.name, "", "", "zeta", found.zeta)
    for one in found.sites:
        yield from _site(one, clock)
    for mixing in found.mixings:
        yield from _mixing(found.name, runs, mixing, clock)
    for edge in found.edges:
        name = f"edge.{edge.one}-{edge.other}"
        yield Line(found.name, "", "", f"{name}.on", edge.on)
        yield Line(found.name, "", "", f"{name}.off", edge.off)
        yield Line(found.name, "", "", f"{name}.bytes", edge.bytes, "B")
    for stretch in found.coordinated:
        text = f"{stretch.coordinator}, term {stretch.term}, rounds {stretch.first} to {stretch.last}"
        yield Line(found.name, "", "", "coordinated", f"{text}, for {' '.join(stretch.sites)}")
    for name, spreads in found.given.items():
        for spread in spreads:
            for part in ("least", "median", "most"):
                yield Line(runs[spread.site], spread.round, "", f"given.{name}.{part}", getattr(spread, part))


def _site(one: SiteDigest, clock: str) -> Iterator[Line]:
    yield Line(one.run, "", "", "site", one.site)
    yield _amount(one.run, "", "joules.spent", one.joules, clock)
    allowed = None if one.share_joules is None else one.share_joules + one.moved_joules
    if allowed is not None:
        yield Line(one.run, "", "", "joules.allowed", allowed, "J")
    yield Line(one.run, "", "", "seconds.gossip", one.gossip_s, "s", clock=clock)
    yield Line(one.run, "", "", "seconds.transfer", one.transfer_s, "s", clock=clock)
    yield Line(one.run, "", "", "bytes.gossip_up", one.bytes_up, "B")
    yield Line(one.run, "", "", "bytes.gossip_down", one.bytes_down, "B")
    yield Line(one.run, "", "", "decided_for_others", one.decided)


def _mixing(name: str, runs: Mapping[str, str], one: MixingDigest, clock: str) -> Iterator[Line]:
    for figure, value in (
        ("accuracy.mean", one.mean),
        ("disagreement.before", one.before),
        ("disagreement.after", one.after),
        ("disagreement.mean_moved", one.moved),
    ):
        known = "no" if value is None else "yes"
        yield Line(name, one.round, "", figure, "" if value is None else value, whole=known)
    yield _amount(name, one.round, "seconds.whole", Amount(value=one.whole_s), clock)
    yield _amount(name, one.round, "joules.whole", one.whole_joules, clock)
    for kind, allowed in (("seconds", one.allowed_s), ("joules", one.allowed_joules)):
        if allowed is not None:
            yield _amount(name, one.round, f"{kind}.allowed", Amount(value=allowed), clock)
    for site, seconds in one.seconds.items():
        yield Line(runs[site], one.round, "", "seconds.gossip", seconds, "s", clock=clock)
    for edge in one.off:
        yield Line(name, one.round, "", "edge.off", edge)


def _amount(run: str, number: int | str, figure: str, one: Amount, clock: str) -> Line:
    kind = figure.partition(".")[0]
    value = "" if one.value is None else one.value
    known = "yes" if one.whole and one.value is not None else "no"
    shown = clock if kind == "seconds" else ""
    return Line(run, number, "", figure, value, UNITS[kind], known, one.quality or "", shown)
