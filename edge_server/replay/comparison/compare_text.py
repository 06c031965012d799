"""Comparison table for the terminal: error quantiles of every figure."""

from __future__ import annotations

from collections.abc import Sequence

from edge_server.replay.comparison.compare import ErrorSpread, Gap, MatchCount, Model
from edge_server.replay.comparison.compare_sites import SitesGap
from shared.runtime.text_table import TextColumn, TextTable

HEADINGS = ("pairs", "exact", "10 %", "median", "90 %", "most")
MODELS: dict[Model, str] = {"same": "the same bits", "different": "DIFFERENT", "unknown": "not known"}
# Characters of a bar, and the error that fills it.
WIDTH, FULL = 16, 0.2

TINY = 1e-4
PARTS = " ▏▎▍▌▋▊▉"


def table(spreads: Sequence[ErrorSpread]) -> TextTable:
    """Return a table of the error distribution of every figure."""
    columns = (TextColumn("error of"), *(TextColumn(heading, right=True) for heading in HEADINGS))
    rows = [(*error_cells(spread), bar(spread.median)) for spread in spreads]
    return TextTable([*columns, TextColumn(f"median, 0 to {FULL:.0%}")], rows)


def error_cells(spread: ErrorSpread) -> list[str]:
    """Return the cells of a figure's errors, under its name and `HEADINGS`."""
    errors = (percent(error) for error in (spread.least_tenth, spread.median, spread.most_tenth))
    return [spread.figure, str(spread.count), str(spread.exact), *errors, most(spread)]


def lines(gap: Gap) -> list[str]:
    """Return the other facts of a gap, one per line."""
    why = f" ({gap.why})" if gap.why else ""
    summary = [
        f"recorded: {gap.recorded}; replayed: {gap.replayed}; {gap.rounds} rounds compared",
        f"final model: {MODELS[gap.model]}{why}",
        f"payloads of the same bits: {_matches(gap.starts)} given to devices, {_matches(gap.updates)} sent by them",
    ]
    return summary + [f"not compared: {skip.what}, {skip.count} times: {skip.why}" for skip in gap.skipped]


def sites_lines(gap: SitesGap) -> list[str]:
    """Return the other facts of the gap of several sites, and of each site."""
    summary = [f"recorded: {gap.recorded}; replayed: {gap.replayed}", f"final models: {MODELS[gap.model]}"]
    summary += [f"not compared: {skip.what}: {skip.why}" for skip in gap.skipped]
    return summary + [f"{site}: {line}" for site, site_gap in gap.sites.items() for line in lines(site_gap)[1:]]


def percent(error: float) -> str:
    """Format a relative error; zero has no digits, so that it stands out."""
    return "0" if error == 0 else f"{100 * error:.2f} %" if error >= TINY else f"{100 * error:.0e} %"


def most(spread: ErrorSpread) -> str:
    """Format the largest error; `no bound` if only the recorded value is zero."""
    return "no bound" if spread.boundless else percent(spread.most)


def bar(error: float) -> str:
    """Draw an error as a bar of eighths of characters; `FULL` fills it."""
    eighths = round(8 * WIDTH * min(1.0, error / FULL))
    return "█" * (eighths // 8) + PARTS[eighths % 8].strip()


def _matches(matches: MatchCount) -> str:
    return f"{matches.same} of {matches.of}"
