"""Report section: edge models, budgets, coordination and backhaul of several sites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from markupsafe import Markup

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import Amount
from edge_server.report.axes import whole_ticks
from edge_server.report.charts import Chart, ChartLine, Point, chart, upright_ticks
from edge_server.report.formatting import NOTHING, format_amount, format_metric, format_number
from edge_server.report.html import render
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest

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
    ratios = [mixing.after / mixing.before for mixing in digest.mixings if mixing.before and mixing.after is not None]
    return render(
        "sites.html",
        digest=digest,
        measured=f"{min(ratios):.3g} to {max(ratios):.3g}" if ratios else "",
        refused=[f"At {site.site}, {refused.line}." for site in digest.sites for refused in site.refused_models],
        rows=[*(_row(digest, site) for site in digest.sites), _total_row(digest)],
        curves=[*_names(digest), ALL, ALLOWED],
        charts=[*filter(None, [*(_charts(digest) if digest.mixings else []), *_spread_charts(digest)])],
        most_rows=MOST_ROWS,
        most_named=MOST_NAMED,
    )


def _format(value: float | None, kind: str) -> str:
    return format_amount(Amount(value=value), kind)


def _row(digest: SitesDigest, site: SiteDigest) -> list[str]:
    allowed_joules = None if site.share_joules is None else site.share_joules + site.moved_joules
    moved_text = f", {site.moved_joules:+.3g} J moved" if site.moved_joules and allowed_joules is not None else ""
    return [
        f"{site.site}, {site.devices} devices",
        format_metric(site.metric_value(), digest.metric),
        site.measured or NOTHING,
        f"{site.rounds} of {digest.rounds}, {site.outcome}",
        _format(site.seconds, "seconds"),
        format_amount(site.joules, "joules"),
        _format(allowed_joules, "joules") + moved_text,
        *[_format(value, "seconds") for value in (site.gossip_s, site.transfer_s)],
        *[_format(value, "bytes") for value in (site.bytes_up, site.bytes_down)],
        str(site.decided),
        ", ".join(f"{reason} {count}" for reason, count in site.refused.items()) or "nothing",
    ]


def _total_row(digest: SitesDigest) -> list[str]:
    means = [mixing for mixing in digest.mixings if mixing.mean is not None]
    mean = f"{format_metric(means[-1].mean, digest.metric)} (mean of {means[-1].of})" if means else NOTHING
    last = digest.mixings[-1] if digest.mixings else None
    budget = f" of {_format(digest.time_s, 'seconds')}" if digest.time_s is not None else ""
    totals = {"gossip_s": "seconds", "transfer_s": "seconds", "bytes_up": "bytes", "bytes_down": "bytes"}
    return [
        *(ALL, mean, means[-1].named if means else NOTHING, f"{digest.rounds} planned"),
        _format(last.whole_s if last else None, "seconds") + budget,
        format_amount(last.whole_joules, "joules") if last else NOTHING,
        _format(digest.joules, "joules"),
        *(_format(sum(getattr(site, name) for site in digest.sites), kind) for name, kind in totals.items()),
        *(NOTHING, NOTHING),
    ]


def _names(digest: SitesDigest) -> list[str]:
    """Return the sites with a curve of their own; none if there are too many."""
    names = [site.site for site in digest.sites]
    return names if len(names) <= MOST_CURVES else []


def _charts(digest: SitesDigest) -> list[Chart | None]:
    """Return charts over the ends of global rounds."""
    is_share = digest.metric == ACCURACY
    scale, name, first = 100.0 if is_share else 1.0, digest.metric.name, len(_names(digest))
    before = _line("before mixing", first, digest.mixings, attrgetter("before"))
    after = _line("after mixing", first + 1, digest.mixings, attrgetter("after"))
    return [
        _site_chart(
            digest,
            f"{name} of edge models{', %' if is_share else ''}",
            lambda mixing: {site: scale * value for site, value in mixing.accuracy.items()},
            lambda mixing: None if mixing.mean is None else scale * mixing.mean,
        ),
        _draw_chart(digest, "disagreement of edge models, before (upper) and after mixing", [before, after]),
        _site_chart(digest, "time spent, s", attrgetter("spent_s"), attrgetter("whole_s"), attrgetter("allowed_s")),
        _site_chart(
            digest,
            "energy spent, J",
            lambda mixing: {k: joules.value for k, joules in mixing.spent_joules.items() if joules.value is not None},
            attrgetter("whole_joules.value"),
            attrgetter("allowed_joules"),
        ),
        _site_chart(
            digest,
            "seconds of gossip",
            attrgetter("seconds"),
            lambda mixing: max(mixing.seconds.values(), default=None),
        ),
    ]


def _site_chart(
    digest: SitesDigest,
    title: str,
    of_sites: Callable[[MixingDigest], ByName],
    of_all: Height,
    allowed: Height = lambda _: None,
) -> Chart | None:
    """Return a chart of a value at the ends of global rounds: of each site, of all, and the budget."""
    names, mixings = _names(digest), digest.mixings
    by_site = [(mixing, of_sites(mixing)) for mixing in mixings]
    curves = [
        _line(site, colour, mixings, lambda mixing, site=site: of_sites(mixing).get(site))  # type: ignore[misc]
        for colour, site in enumerate(names)
    ]
    ranges = [(float(mixing.round), min(values.values()), max(values.values())) for mixing, values in by_site if values]
    curves.append(_line(ALL, len(names), mixings, of_all, [] if names else ranges))
    curves.append(_line(ALLOWED, len(names) + 1, mixings, allowed))
    return _draw_chart(digest, title, curves)


def _line(
    name: str,
    colour: int,
    mixings: Sequence[MixingDigest],
    height: Height,
    band: Sequence[tuple[float, float, float]] = (),
) -> ChartLine:
    values = [(mixing, value) for mixing in mixings if (value := height(mixing)) is not None]
    points = [Point(row.round, value, f"round {row.named}: {format_number(value)}") for row, value in values]
    return ChartLine(name, colour, points, band)


def _draw_chart(digest: SitesDigest, title: str, curves: Sequence[ChartLine]) -> Chart | None:
    """Return a chart over edge rounds; None if the value is unknown."""
    heights = [point.y for curve in curves for point in curve.points]
    heights += [height for curve in curves for _, *ends in curve.band for height in ends]
    return chart(title, X_TITLE, whole_ticks(digest.rounds), upright_ticks(heights), curves) if heights else None


def _spread_charts(digest: SitesDigest) -> list[Chart | None]:
    """Return charts of values assigned to devices that differ: the median per site and the range over all."""
    charts, names = list[Chart | None](), _names(digest)
    for name in sorted(digest.given, key=[*VALUE_TITLES, *digest.given].index):
        spreads, by_round = digest.given[name], defaultdict[int, list[float]](list)
        for spread in spreads:
            by_round[spread.round] += (spread.least, spread.most)
        band = [(float(number), min(ends), max(ends)) for number, ends in sorted(by_round.items())]
        if min(low for _, low, _ in band) == max(high for _, _, high in band):
            continue
        tops = [Point(number, high, f"at most {high:.4g}") for number, _, high in band]
        curves = [ChartLine(ALL, len(names), tops, band)]
        for colour, site in enumerate(names):
            points = [
                Point(row.round, row.median, f"edge round {row.round}: {row.least:.4g} to {row.most:.4g}")
                for row in spreads
                if row.site == site
            ]
            curves.append(ChartLine(f"{site}, median", colour, points))
        charts.append(_draw_chart(digest, f"{VALUE_TITLES.get(name, name)}: medians, and from least to most", curves))
    return charts
