"""Report section: edge models, budgets, coordination and backhaul of several sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from edge_server.journal.compared_metric import ACCURACY
from edge_server.report import formatting
from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.charts import ChartLine, Point, chart, key
from edge_server.report.digest import Amount
from edge_server.report.html import NOTHING, Markup, element, join
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest
from edge_server.report.tables import table

MOST_CURVES = 6
"""Sites beyond which a single curve with a band stands for all."""
MOST_ROWS, MOST_NAMED = 200, 12
VALUE_TITLES: Mapping[str, str] = {
    "steps": "\N{GREEK SMALL LETTER RHO}, share of the local steps",
    "sent": "\N{GREEK SMALL LETTER THETA}, share of the change sent",
}
X_TITLE, ALL, ALLOWED = "edge round", "all sites", "budget so far"

ByName = Mapping[str, float]
Height = Callable[[MixingDigest], float | None]


def sites(digest: SitesDigest) -> Markup:
    """Return the section of a plan's sites."""
    return join(
        [
            element("p", _introduction(digest), class_="note"),
            *_refused_models(digest),
            _site_table(digest),
            _legend(digest),
            element("div", _charts(digest), class_="charts"),
            *_coordinator_table(digest),
            *_edge_table(digest),
        ],
    )


def _introduction(digest: SitesDigest) -> list[str]:
    count, zeta = len(digest.sites) + len(digest.missing), "\N{GREEK SMALL LETTER ZETA}"
    text = f"{count} sites, graph {digest.graph}; a global round has {digest.edge_rounds} edge rounds, and rounds are "
    text += f"named global.edge. With all edges on, mixing leaves at most {zeta} = {digest.zeta:.3g} of disagreement."
    sentences = [text]
    ratios = [mixing.after / mixing.before for mixing in digest.mixings if mixing.before and mixing.after is not None]
    if ratios:
        sentences.append(f" Measured: {min(ratios):.3g} to {max(ratios):.3g}.")
    if digest.missing:
        sentences.append(f" Runs missing: {', '.join(digest.missing)}.")
    return sentences


def _refused_models(digest: SitesDigest) -> list[Markup]:
    sentences = [f"At {site.site}, {refused.line}." for site in digest.sites for refused in site.refused_models]
    more = f" And {len(sentences) - MOST_NAMED} more." if len(sentences) > MOST_NAMED else ""
    return [element("p", element("strong", " ".join(sentences[:MOST_NAMED]) + more))] if sentences else []


def _site_table(digest: SitesDigest) -> Markup:
    head = ["site", digest.metric.name, "after round", "rounds", "seconds", "joules", "allowed", "gossip", "transfer"]
    rows = [_row(digest, site) for site in digest.sites]
    means = [mixing for mixing in digest.mixings if mixing.mean is not None]
    last = digest.mixings[-1] if digest.mixings else None
    seconds = formatting.format_amount(_amount(last.whole_s if last else None), "seconds")
    budget = [f"of {formatting.format_amount(_amount(digest.time_s), 'seconds')}"] if digest.time_s is not None else []
    total = [
        ALL,
        _mean(digest, means[-1]) if means else NOTHING,
        means[-1].named if means else NOTHING,
        f"{digest.rounds} planned",
        " ".join([seconds, *budget]),
        formatting.format_amount(last.whole_joules, "joules") if last else NOTHING,
        _joules(digest.joules),
        *[_total(digest.sites, name, "seconds") for name in ("gossip_s", "transfer_s")],
        *[_total(digest.sites, name, "bytes") for name in ("bytes_up", "bytes_down")],
        NOTHING,
        NOTHING,
    ]
    return table([*head, "bytes up", "bytes down", "decided for others (rounds)", "refused"], [*rows, total])


def _mean(digest: SitesDigest, mixing: MixingDigest) -> str:
    return f"{formatting.format_metric(mixing.mean, digest.metric)} (mean of {mixing.of})"


def _row(digest: SitesDigest, site: SiteDigest) -> list[str]:
    allowed_joules = None if site.share_joules is None else site.share_joules + site.moved_joules
    moved_text = f", {site.moved_joules:+.3g} J moved" if site.moved_joules and allowed_joules is not None else ""
    return [
        f"{site.site}, {site.devices} devices",
        formatting.format_metric(site.figure, digest.metric),
        site.measured or NOTHING,
        f"{site.rounds} of {digest.rounds}, {site.outcome}",
        formatting.format_amount(_amount(site.seconds), "seconds"),
        formatting.format_amount(site.joules, "joules"),
        _joules(allowed_joules) + moved_text,
        *[formatting.format_amount(_amount(value), "seconds") for value in (site.gossip_s, site.transfer_s)],
        *[formatting.format_amount(Amount(value=value), "bytes") for value in (site.bytes_up, site.bytes_down)],
        str(site.decided),
        ", ".join(f"{reason} {count}" for reason, count in site.refused.items()) or "nothing",
    ]


def _amount(value: float | None) -> Amount:
    return Amount(value=value)


def _joules(value: float | None) -> str:
    return formatting.format_amount(Amount(value=value), "joules")


def _total(all_sites: Iterable[SiteDigest], name: str, kind: str) -> str:
    return formatting.format_amount(Amount(value=sum(getattr(site, name) for site in all_sites)), kind)


def _names(digest: SitesDigest) -> list[str]:
    """Return the sites with a curve of their own; none if there are too many."""
    names = [site.site for site in digest.sites]
    return names if len(names) <= MOST_CURVES else []


def _legend(digest: SitesDigest) -> Markup:
    """Return the legend of sites; the last two curves are the total and the budget."""
    named = [*_names(digest), ALL, ALLOWED]
    return element("p", (element("span", [key(colour), name]) for colour, name in enumerate(named)), class_="legend")


def _charts(digest: SitesDigest) -> list[Markup]:
    mixings, is_share = digest.mixings, digest.metric == ACCURACY
    parts = [
        _site_chart(
            digest,
            f"{digest.metric.name} of edge models{', %' if is_share else ''}",
            lambda mixing: _percentages(mixing.accuracy) if is_share else mixing.accuracy,
            lambda mixing: _percent_or_none(mixing.mean) if is_share else mixing.mean,
        ),
        _disagreement_chart(digest),
        _site_chart(
            digest,
            "time spent, s",
            lambda mixing: mixing.spent_s,
            lambda mixing: mixing.whole_s,
            lambda mixing: mixing.allowed_s,
        ),
        _site_chart(
            digest,
            "energy spent, J",
            lambda mixing: {
                site: amount.value for site, amount in mixing.spent_joules.items() if amount.value is not None
            },
            lambda mixing: mixing.whole_joules.value,
            lambda mixing: mixing.allowed_joules,
        ),
        _site_chart(
            digest,
            "seconds of gossip",
            lambda mixing: mixing.seconds,
            lambda mixing: max(mixing.seconds.values(), default=None),
        ),
    ]
    spreads = [
        _spread_chart(digest, name)
        for name in sorted(digest.given, key=[*VALUE_TITLES, *digest.given].index)
        if _differs(digest, name)
    ]
    return [figure for figure in [*(parts if mixings else []), *spreads] if figure]


def _percentages(shares: ByName) -> dict[str, float]:
    return {site: 100 * share for site, share in shares.items()}


def _percent_or_none(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _site_chart(
    digest: SitesDigest,
    title: str,
    of_sites: Callable[[MixingDigest], ByName],
    of_all: Height,
    allowed: Height = lambda _: None,
) -> Markup:
    """Return a chart of a value at the ends of global rounds: of each site, of all, and the budget."""
    names, mixings = _names(digest), digest.mixings
    curves = [
        ChartLine(
            site, colour, [_point(mixing, of_sites(mixing)[site]) for mixing in mixings if site in of_sites(mixing)]
        )
        for colour, site in enumerate(names)
    ]
    all_of = [(mixing, value) for mixing in mixings if (value := of_all(mixing)) is not None]
    ranges = [(float(mixing.round), sorted(of_sites(mixing).values())) for mixing in mixings if of_sites(mixing)]
    band = [] if names else [(at, values[0], values[-1]) for at, values in ranges]
    curves.append(ChartLine(ALL, len(names), [_point(mixing, value) for mixing, value in all_of], band))
    budget = [(mixing, value) for mixing in mixings if (value := allowed(mixing)) is not None]
    curves.append(ChartLine(ALLOWED, len(names) + 1, [_point(mixing, value) for mixing, value in budget]))
    heights = [point.y for curve in curves for point in curve.points] + [y for _, *ends in band for y in ends]
    return _draw_chart(digest, title, curves, heights)


def _point(mixing: MixingDigest, value: float) -> Point:
    return Point(mixing.round, value, f"round {mixing.named}: {formatting.format_number(value)}")


def _draw_chart(digest: SitesDigest, title: str, curves: Sequence[ChartLine], heights: Sequence[float]) -> Markup:
    """Return a chart over edge rounds; nothing if the value is unknown."""
    if not heights:
        return join()
    least, most = min(heights), max(heights)
    return chart(
        title, X_TITLE, whole_ticks(digest.rounds), ticks(0.0 if 0 <= least < most / 2 else least, most), curves
    )


def _disagreement_chart(digest: SitesDigest) -> Markup:
    """Return the disagreement of models before and after mixing, where the journals of all sites are known."""
    curves, first = list[ChartLine](), len(_names(digest))
    for index, when in enumerate(("before", "after")):
        heights = [(mixing, getattr(mixing, when)) for mixing in digest.mixings]
        points = [_point(mixing, value) for mixing, value in heights if value is not None]
        curves.append(ChartLine(f"{when} mixing", first + index, points))
    title = "disagreement of edge models, before (upper) and after mixing"
    return _draw_chart(digest, title, curves, [point.y for curve in curves for point in curve.points])


def _differs(digest: SitesDigest, name: str) -> bool:
    spreads = digest.given[name]
    return min(spread.least for spread in spreads) < max(spread.most for spread in spreads)


def _spread_chart(digest: SitesDigest, name: str) -> Markup:
    """Return the values assigned to devices: the median per site and the range over all."""
    spreads, names = digest.given[name], _names(digest)
    by_round: dict[int, list[float]] = {}
    for spread in spreads:
        by_round.setdefault(spread.round, []).extend((spread.least, spread.most))
    band = [(float(at), min(ends), max(ends)) for at, ends in sorted(by_round.items())]
    curves = [ChartLine(ALL, len(names), [Point(at, high, f"at most {high:.4g}") for at, _, high in band], band)]
    for colour, site in enumerate(names):
        points = [
            Point(spread.round, spread.median, f"edge round {spread.round}: {spread.least:.4g} to {spread.most:.4g}")
            for spread in spreads
            if spread.site == site
        ]
        curves.append(ChartLine(f"{site}, median", colour, points))
    title = f"{VALUE_TITLES.get(name, name)}: medians, and from least to most"
    return _draw_chart(digest, title, curves, [y for _, *ends in band for y in ends])


def _coordinator_table(digest: SitesDigest) -> list[Markup]:
    if not digest.coordinated:
        return []
    rows = [
        [
            period.first if period.rounds == 1 else f"{period.first} to {period.last}",
            period.coordinator,
            str(period.term),
            ", ".join(period.sites[:MOST_NAMED]) + ", \N{HORIZONTAL ELLIPSIS}" * (len(period.sites) > MOST_NAMED),
            period.cause or NOTHING,
        ]
        for period in digest.coordinated[:MOST_ROWS]
    ]
    head = ["rounds", "coordinator", "term", "for the devices of", "cause of the term"]
    return [element("h4", "Coordinators"), table(head, rows), *_omitted_note(len(digest.coordinated))]


def _edge_table(digest: SitesDigest) -> list[Markup]:
    rows = [
        [
            f"{edge.one} - {edge.other}",
            str(edge.on),
            str(edge.off),
            ", ".join(f"{cause} {count}" for cause, count in edge.causes.items()) or NOTHING,
            ", ".join(edge.rounds[:MOST_NAMED]) + ", \N{HORIZONTAL ELLIPSIS}" * (len(edge.rounds) > MOST_NAMED)
            or NOTHING,
            ", ".join(edge.unlike[:MOST_NAMED]) or NOTHING,
            formatting.format_amount(Amount(value=edge.bytes), "bytes"),
        ]
        for edge in digest.edges[:MOST_ROWS]
    ]
    head = ["edge", "gossips on", "off", "causes", "off after rounds", "on at one end only", "bytes"]
    return [element("h4", "Edges of the graph"), table(head, rows), *_omitted_note(len(digest.edges))]


def _omitted_note(count: int) -> list[Markup]:
    omitted = count - MOST_ROWS
    return [element("p", f"and {omitted} more; see the CSV or JSON", class_="note")] if omitted > 0 else []
