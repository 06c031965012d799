"""Several edge servers of one run: their models, how far these are apart, budgets, who decided when, the backhaul."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from edge_server.report import formatting
from edge_server.report.charts import ChartLine, Point, chart, key, ticks, whole_ticks
from edge_server.report.digest import Amount
from edge_server.report.html import NOTHING, Markup, element, joined
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest
from edge_server.report.tables import table

MOST_CURVES = 6
"""Sites beyond which there is one curve of all, between the least and the most."""
MOST_ROWS, MOST_NAMED = 200, 12
GIVEN: Mapping[str, str] = {
    "steps": "\N{GREEK SMALL LETTER RHO}, share of the local steps",
    "sent": "\N{GREEK SMALL LETTER THETA}, share of the change sent",
}
AT, ALL, ALLOWED = "edge round", "all sites", "allowed by then"

ByName = Mapping[str, float]
Height = Callable[[MixingDigest], float | None]


def sites(found: SitesDigest) -> Markup:
    """Return what the runs of a plan's sites came to together."""
    return joined(
        element("p", *_about(found), class_="note"),
        *_refused(found),
        _sites(found),
        _legend(found),
        element("div", *_charts(found), class_="charts"),
        *_coordinated(found),
        *_edges(found),
    )


def _about(found: SitesDigest) -> list[str]:
    """Return what the sites are, and how mixing did."""
    count, zeta = len(found.sites) + len(found.missing), "\N{GREEK SMALL LETTER ZETA}"
    about = f"{count} sites, graph {found.graph}; a global round has {found.edge_rounds} edge rounds, and rounds are "
    about += f"named global.edge. With all edges on, mixing leaves at most {zeta} = {found.zeta:.3g} of disagreement."
    said = [about]
    ratios = [one.after / one.before for one in found.mixings if one.before and one.after is not None]
    if ratios:
        said.append(f" It left {min(ratios):.3g} to {max(ratios):.3g} of it.")
    if found.missing:
        said.append(f" The runs of {', '.join(found.missing)} are not here.")
    return said


def _refused(found: SitesDigest) -> list[Markup]:
    """Return whose models were refused, and by whom."""
    each = [f"At {one.site}, {refused.line}." for one in found.sites for refused in one.refused_models]
    more = f" And {len(each) - MOST_NAMED} more." if len(each) > MOST_NAMED else ""
    return [element("p", element("strong", " ".join(each[:MOST_NAMED]) + more))] if each else []


def _sites(found: SitesDigest) -> Markup:
    """Return a row a site, and one for all."""
    head = ["site", "accuracy", "after round", "rounds", "seconds", "joules", "may spend", "gossip", "of it transfer"]
    rows = [_row(found, one) for one in found.sites]
    means = [one for one in found.mixings if one.mean is not None]
    last = found.mixings[-1] if found.mixings else None
    seconds = formatting.amount(_seconds(last.whole_s if last else None), "seconds")
    budget = [f"of {formatting.amount(_seconds(found.time_s), 'seconds')}"] if found.time_s is not None else []
    whole = [
        ALL,
        formatting.share(means[-1].mean) + (f" (mean of {means[-1].of})" if means else "") if means else NOTHING,
        means[-1].named if means else NOTHING,
        f"{found.rounds} planned",
        " ".join([seconds, *budget]),
        formatting.amount(last.whole_joules, "joules") if last else NOTHING,
        _joules(found.joules),
        *[_total(found.sites, name, "seconds") for name in ("gossip_s", "transfer_s")],
        *[_total(found.sites, name, "bytes") for name in ("bytes_up", "bytes_down")],
        NOTHING,
        NOTHING,
    ]
    return table([*head, "bytes up", "bytes down", "rounds decided for others", "refused"], [*rows, whole])


def _row(found: SitesDigest, one: SiteDigest) -> list[str]:
    may = None if one.share_joules is None else one.share_joules + one.moved_joules
    moved = f", {one.moved_joules:+.3g} J moved" if one.moved_joules and may is not None else ""
    return [
        f"{one.site}, {one.devices} devices",
        formatting.share(one.accuracy),
        one.measured or NOTHING,
        f"{one.rounds} of {found.rounds}, {one.outcome}",
        formatting.amount(_seconds(one.seconds), "seconds"),
        formatting.amount(one.joules, "joules"),
        _joules(may) + moved,
        *[formatting.amount(_seconds(value), "seconds") for value in (one.gossip_s, one.transfer_s)],
        *[formatting.amount(Amount(value=value), "bytes") for value in (one.bytes_up, one.bytes_down)],
        str(one.decided),
        ", ".join(f"{reason} {count}" for reason, count in one.refused.items()) or "nothing",
    ]


def _seconds(value: float | None) -> Amount:
    return Amount(value=value)


def _joules(value: float | None) -> str:
    return formatting.amount(Amount(value=value), "joules")


def _total(every: Iterable[SiteDigest], name: str, kind: str) -> str:
    return formatting.amount(Amount(value=sum(getattr(one, name) for one in every)), kind)


def _names(found: SitesDigest) -> list[str]:
    """Return the sites that have a curve each; none where there are too many."""
    names = [one.site for one in found.sites]
    return names if len(names) <= MOST_CURVES else []


def _legend(found: SitesDigest) -> Markup:
    """Return which curve is of which site; the last two are of all, and of what budgets allow."""
    named = [*_names(found), ALL, ALLOWED]
    return element("p", *(element("span", key(colour), name) for colour, name in enumerate(named)), class_="legend")


def _charts(found: SitesDigest) -> list[Markup]:
    mixings = found.mixings
    parts = [
        _by_site(found, "accuracy of edge models, %", lambda one: _percent(one.accuracy), lambda one: _times(one.mean)),
        _apart(found),
        _by_site(found, "time spent, s", lambda one: one.spent_s, lambda one: one.whole_s, lambda one: one.allowed_s),
        _by_site(
            found,
            "energy spent, J",
            lambda one: {site: amount.value for site, amount in one.spent_joules.items() if amount.value is not None},
            lambda one: one.whole_joules.value,
            lambda one: one.allowed_joules,
        ),
        _by_site(
            found, "seconds of gossip", lambda one: one.seconds, lambda one: max(one.seconds.values(), default=None)
        ),
    ]
    given = [
        _spread(found, name) for name in sorted(found.given, key=[*GIVEN, *found.given].index) if _differs(found, name)
    ]
    return [one for one in [*(parts if mixings else []), *given] if one]


def _percent(shares: ByName) -> dict[str, float]:
    return {site: 100 * one for site, one in shares.items()}


def _times(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _by_site(
    found: SitesDigest,
    title: str,
    of_sites: Callable[[MixingDigest], ByName],
    of_all: Height,
    allowed: Height = lambda _: None,
) -> Markup:
    """Return a figure of every site at the ends of global rounds, that of all, and what is allowed.

    Args:
        title: Of the figure, with its unit.
    """
    names, mixings = _names(found), found.mixings
    curves = [
        ChartLine(site, colour, [_point(one, of_sites(one)[site]) for one in mixings if site in of_sites(one)])
        for colour, site in enumerate(names)
    ]
    all_of = [(one, value) for one in mixings if (value := of_all(one)) is not None]
    ranges = [(float(one.round), sorted(of_sites(one).values())) for one in mixings if of_sites(one)]
    band = [] if names else [(at, values[0], values[-1]) for at, values in ranges]
    curves.append(ChartLine(ALL, len(names), [_point(one, value) for one, value in all_of], band))
    may = [(one, value) for one in mixings if (value := allowed(one)) is not None]
    curves.append(ChartLine(ALLOWED, len(names) + 1, [_point(one, value) for one, value in may]))
    heights = [point.y for curve in curves for point in curve.points] + [y for _, *ends in band for y in ends]
    return _drawn(found, title, curves, heights)


def _point(one: MixingDigest, value: float) -> Point:
    return Point(one.round, value, f"round {one.named}: {formatting.digits(value)}")


def _drawn(found: SitesDigest, title: str, curves: Sequence[ChartLine], heights: Sequence[float]) -> Markup:
    """Return a chart over edge rounds; nothing where nobody knows the figure."""
    if not heights:
        return joined()
    least, most = min(heights), max(heights)
    return chart(title, AT, whole_ticks(found.rounds), ticks(0.0 if 0 <= least < most / 2 else least, most), curves)


def _apart(found: SitesDigest) -> Markup:
    """Return how far models were apart before and after mixing, as far as all journals tell."""
    curves, first = list[ChartLine](), len(_names(found))
    for place, when in enumerate(("before", "after")):
        heights = [(one, getattr(one, when)) for one in found.mixings]
        points = [_point(one, value) for one, value in heights if value is not None]
        curves.append(ChartLine(f"{when} mixing", first + place, points))
    title = "disagreement of edge models, before (upper) and after mixing"
    return _drawn(found, title, curves, [point.y for curve in curves for point in curve.points])


def _differs(found: SitesDigest, name: str) -> bool:
    spreads = found.given[name]
    return min(one.least for one in spreads) < max(one.most for one in spreads)


def _spread(found: SitesDigest, name: str) -> Markup:
    """Return what devices were given: the median of each site, and where the devices of all lie."""
    spreads, names = found.given[name], _names(found)
    by_round: dict[int, list[float]] = {}
    for one in spreads:
        by_round.setdefault(one.round, []).extend((one.least, one.most))
    band = [(float(at), min(ends), max(ends)) for at, ends in sorted(by_round.items())]
    curves = [ChartLine(ALL, len(names), [Point(at, high, f"at most {high:.4g}") for at, _, high in band], band)]
    for colour, site in enumerate(names):
        points = [
            Point(one.round, one.median, f"edge round {one.round}: {one.least:.4g} to {one.most:.4g}")
            for one in spreads
            if one.site == site
        ]
        curves.append(ChartLine(f"{site}, median", colour, points))
    title = f"{GIVEN.get(name, name)}: medians, and from least to most"
    return _drawn(found, title, curves, [y for _, *ends in band for y in ends])


def _coordinated(found: SitesDigest) -> list[Markup]:
    """Return who decided when, a row a stretch of rounds."""
    if not found.coordinated:
        return []
    rows = [
        [
            one.first if one.rounds == 1 else f"{one.first} to {one.last}",
            one.coordinator,
            str(one.term),
            ", ".join(one.sites[:MOST_NAMED]) + ", \N{HORIZONTAL ELLIPSIS}" * (len(one.sites) > MOST_NAMED),
            one.cause or NOTHING,
        ]
        for one in found.coordinated[:MOST_ROWS]
    ]
    head = ["rounds", "coordinator", "term", "for the devices of", "why its term began"]
    return [element("h4", "Who coordinated when"), table(head, rows), *_more(len(found.coordinated))]


def _edges(found: SitesDigest) -> list[Markup]:
    """Return how often each edge was on."""
    rows = [
        [
            f"{one.one} - {one.other}",
            str(one.on),
            str(one.off),
            ", ".join(f"{cause} {count}" for cause, count in one.causes.items()) or NOTHING,
            ", ".join(one.rounds[:MOST_NAMED]) + ", \N{HORIZONTAL ELLIPSIS}" * (len(one.rounds) > MOST_NAMED)
            or NOTHING,
            ", ".join(one.unlike[:MOST_NAMED]) or NOTHING,
            formatting.amount(Amount(value=one.bytes), "bytes"),
        ]
        for one in found.edges[:MOST_ROWS]
    ]
    head = ["edge", "gossips on", "off", "why, at either end", "off after rounds", "on at one end alone", "bytes"]
    return [element("h4", "Edges of the graph"), table(head, rows), *_more(len(found.edges))]


def _more(count: int) -> list[Markup]:
    rest = count - MOST_ROWS
    return [element("p", f"and {rest} more, which the CSV and JSON have", class_="note")] if rest > 0 else []
