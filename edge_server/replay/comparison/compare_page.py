"""Comparison page: self-contained HTML of a gap's errors and curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from edge_server.replay.comparison import compare_text
from edge_server.replay.comparison.compare import PAYLOAD, ROUND, TASK, ErrorSpread, Gap, Pair, ordered_figures
from edge_server.replay.comparison.compare_sites import OF_ALL, SitesGap
from edge_server.report import formatting
from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.bars import Slice, bar
from edge_server.report.charts import ChartLine, Point, chart, key
from edge_server.report.html import Markup, document, element, join
from edge_server.report.summarise import natural_order
from edge_server.report.tables import table

Ends: TypeAlias = tuple[str, str]

NAMES: Ends = ("recorded", "replayed")
OF_TASK = (
    *("download_s", "compute_s", "exchange_s", "upload_s", "compute_joules"),
    *("bytes_up", "bytes_down", "features_bytes", "gradient_bytes"),
)
# Figures whose axis starts at their minimum instead of zero.
RATES = (*(figure for figure in ROUND if figure != "round_s"), "mean_accuracy")
# With more devices, the page has no curves per device, only the table.
MOST_DEVICES = 60


def page(gap: Gap) -> str:
    """Return a gap as HTML."""
    return document(
        f"{gap.replayed} against {gap.recorded}",
        [
            _head("How far the replay is from the run", compare_text.lines(gap)),
            _section("Relative errors", render_errors(gap.spreads)),
            _section("Rounds", _rounds(gap)),
            *(_section(f"Device {device}", _charts(pairs, OF_TASK)) for device, pairs in _by_device(gap)),
        ],
    )


def sites_page(gap: SitesGap) -> str:
    """Return the gap of several sites as HTML."""
    return document(
        f"{gap.replayed} against {gap.recorded}",
        [
            _head("How far the replay is from the runs of all sites", compare_text.sites_lines(gap)),
            _section("Relative errors of all sites", render_errors(gap.spreads)),
            _section("All sites together", _charts(gap.pairs, list(OF_ALL))),
            *(
                _section(f"Site {site}", join([render_errors(site_gap.spreads), _rounds(site_gap)]))
                for site, site_gap in gap.sites.items()
            ),
        ],
    )


def _head(title: str, lines: Sequence[str]) -> Markup:
    keys = [element("li", [key(colour), element("b", name)]) for colour, name in enumerate(NAMES)]
    facts = element("ul", (element("li", line) for line in lines))
    return element("header", [element("h1", title), facts, element("ul", keys, class_="runs")])


def _rounds(gap: Gap) -> Markup:
    figures = [name for name in ordered_figures(gap.pairs) if name not in {*TASK, PAYLOAD}]
    return _charts([pair for pair in gap.pairs if pair.figure in figures], figures)


def _section(title: str, content: str) -> Markup:
    return element("section", [element("h2", title), content])


def render_errors(spreads: Sequence[ErrorSpread]) -> Markup:
    """Return a table of the error quantiles of every figure, with the median as a bar."""
    rows = []
    for spread in spreads:
        errors = [compare_text.percent(error) for error in (spread.least_tenth, spread.median, spread.most_tenth)]
        drawn = bar([Slice("compute", min(spread.median, compare_text.FULL), errors[1])], compare_text.FULL)
        rows.append([spread.figure, str(spread.count), str(spread.exact), *errors, compare_text.most(spread), drawn])
    heads = ["figure", "pairs", "exact", "10 %", "median", "90 %", "most", f"median, 0 to {compare_text.FULL:.0%}"]
    return table(heads, rows)


def _charts(pairs: Sequence[Pair], figures: Sequence[str]) -> Markup:
    by_figure = [(figure, rows) for figure in figures if (rows := [pair for pair in pairs if pair.figure == figure])]
    return element("div", (_chart(figure, rows) for figure, rows in by_figure), class_="charts")


def _chart(figure: str, pairs: Sequence[Pair]) -> Markup:
    """Return a chart of a figure's recorded and replayed values over rounds; axes of costs start at zero."""
    heights = [height for pair in pairs for height in (pair.recorded, pair.replayed)]
    unit, size = formatting.unit_of(max(heights), "bytes") if "bytes" in figure else ("", 1.0)
    curves = [
        ChartLine(
            name, colour, [Point(pair.round, getattr(pair, name) / size, _label_point(pair, name)) for pair in pairs]
        )
        for colour, name in enumerate(NAMES)
    ]
    least = min(heights) if figure in RATES else 0.0
    title = f"{figure}, {unit}" if unit else figure
    rounds = whole_ticks(max(pair.round for pair in pairs))
    return chart(title, "round", rounds, ticks(least / size, max(heights) / size), curves)


def _label_point(pair: Pair, name: str) -> str:
    error = "no bound" if pair.error is None else f"{100 * pair.error:+.2f} %"
    return f"round {pair.round}: {formatting.format_number(getattr(pair, name))}; error {error}"


def _by_device(gap: Gap) -> list[tuple[str, list[Pair]]]:
    by_device: dict[str, list[Pair]] = {}
    for pair in gap.pairs:
        if pair.device:
            by_device.setdefault(pair.device, []).append(pair)
    if len(by_device) > MOST_DEVICES:
        return []
    return sorted(by_device.items(), key=lambda pair: natural_order(pair[0]))
