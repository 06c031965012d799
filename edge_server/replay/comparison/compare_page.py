"""Comparison page: self-contained HTML of a gap's errors and curves."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from edge_server.replay.comparison import compare_text
from edge_server.replay.comparison.compare import PAYLOAD, ROUND, TASK, ErrorSpread, Gap, Pair, ordered_figures
from edge_server.replay.comparison.compare_sites import OF_ALL, SitesGap
from edge_server.report import formatting
from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.charts import Chart, ChartLine, Point, Slice, chart
from edge_server.report.html import document, macro, render
from edge_server.report.summarise import natural_order
from edge_server.report.tables import table

NAMES = ("recorded", "replayed")
OF_TASK = [name for name in TASK if not name.endswith("_joules") or name == "compute_joules"]
# Figures whose axis starts at their minimum instead of zero.
RATES = (*(figure for figure in ROUND if figure != "round_s"), "mean_accuracy")
# With more devices, the page has no curves per device, only the table.
MOST_DEVICES = 60


def page(gap: Gap) -> str:
    """Return a gap as HTML."""
    sections = {"Relative errors": render_errors(gap.spreads), "Rounds": _rounds(gap)}
    sections |= {f"Device {device}": _charts(pairs, OF_TASK) for device, pairs in _by_device(gap)}
    return _document(gap, "How far the replay is from the run", compare_text.lines(gap), sections)


def sites_page(gap: SitesGap) -> str:
    """Return the gap of several sites as HTML."""
    sections = {
        "Relative errors of all sites": render_errors(gap.spreads),
        "All sites together": _charts(gap.pairs, list(OF_ALL)),
    }
    for site, site_gap in gap.sites.items():
        sections[f"Site {site}"] = Markup("{}{}").format(render_errors(site_gap.spreads), _rounds(site_gap))
    return _document(gap, "How far the replay is from the runs of all sites", compare_text.sites_lines(gap), sections)


def _document(gap: Gap | SitesGap, title: str, facts: Sequence[str], sections: dict[str, Markup]) -> str:
    runs = [(name, "") for name in NAMES]
    content = render("gap.html", title=title, facts=facts, runs=runs, sections=sections)
    return document(f"{gap.replayed} against {gap.recorded}", content)


def _rounds(gap: Gap) -> Markup:
    figures = [name for name in ordered_figures(gap.pairs) if name not in {*TASK, PAYLOAD}]
    return _charts([pair for pair in gap.pairs if pair.figure in figures], figures)


def render_errors(spreads: Sequence[ErrorSpread]) -> Markup:
    """Return a table of the error quantiles of every figure, with the median as a bar."""
    full, rows = compare_text.FULL, list[list[str]]()
    for spread in spreads:
        part = Slice("compute", min(spread.median, full), compare_text.percent(spread.median))
        rows.append([*compare_text.error_cells(spread), macro("bar")([part], full)])
    return table(["figure", *compare_text.HEADINGS, f"median, 0 to {full:.0%}"], rows)


def _charts(pairs: Sequence[Pair], figures: Sequence[str]) -> Markup:
    by_figure = [(figure, rows) for figure in figures if (rows := [pair for pair in pairs if pair.figure == figure])]
    return macro("charts")([_chart(figure, rows) for figure, rows in by_figure])


def _chart(figure: str, pairs: Sequence[Pair]) -> Chart:
    """Return a chart of a figure's recorded and replayed values over rounds; axes of costs start at zero."""
    heights = [height for pair in pairs for height in (pair.recorded, pair.replayed)]
    unit, size = formatting.unit_of(max(heights), "bytes") if "bytes" in figure else ("", 1.0)
    curves = []
    for colour, name in enumerate(NAMES):
        points = []
        for pair in pairs:
            error, value = "no bound" if pair.error is None else f"{100 * pair.error:+.2f} %", getattr(pair, name)
            title = f"round {pair.round}: {formatting.format_number(value)}; error {error}"
            points.append(Point(pair.round, value / size, title))
        curves.append(ChartLine(name, colour, points))
    least = min(heights) if figure in RATES else 0.0
    rounds, heading = whole_ticks(max(pair.round for pair in pairs)), f"{figure}, {unit}" if unit else figure
    return chart(heading, "round", rounds, ticks(least / size, max(heights) / size), curves)


def _by_device(gap: Gap) -> list[tuple[str, list[Pair]]]:
    by_device: dict[str, list[Pair]] = {}
    for pair in gap.pairs:
        if pair.device:
            by_device.setdefault(pair.device, []).append(pair)
    return sorted(by_device.items(), key=lambda pair: natural_order(pair[0])) if len(by_device) <= MOST_DEVICES else []
