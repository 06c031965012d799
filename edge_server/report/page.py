"""The report as one page that needs nothing else: no network, no script, no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version

from edge_server.journal.rollouts.state import RolloutState
from edge_server.report import formatting
from edge_server.report.charts import key
from edge_server.report.digest import Digest
from edge_server.report.html import Markup, document, element, joined
from edge_server.report.sections.accuracy import accuracy
from edge_server.report.sections.decisions import decisions
from edge_server.report.sections.progress import progress
from edge_server.report.sections.rollouts import rollouts as rollouts_section
from edge_server.report.sections.sites import sites as sites_section
from edge_server.report.sections.spent import spent
from edge_server.report.sections.timeline import timeline
from edge_server.report.sites.digest import SitesDigest
from edge_server.report.tables import clock, facts_table, names, summary, targets_table
from edge_server.report.targets import targets as usual_targets

WIDE = 3
"""Runs whose outcomes need the page's whole width."""


def page(
    runs: Sequence[Digest],
    targets: Sequence[float] = (),
    rollouts: Sequence[RolloutState] = (),
    sites: Sequence[SitesDigest] = (),
) -> str:
    """Return the report of one run or of several side by side.

    Args:
        runs: The first is what the others are compared with.
        targets: Accuracies from 0 to 1; none for round ones that every run reached.
        rollouts: Of releases of these runs.
        sites: What those of them that belong together came to.
    """
    wanted = list(targets) or usual_targets(runs)
    title = f"Run {runs[0].run}" if len(runs) == 1 else f"{len(runs)} runs side by side"
    outcome, *others = _sections(runs, wanted)
    together = [_section(_sites_title(one, sites), sites_section(one)) for one in sites]
    return document(title, _top(runs, title), outcome, *together, *others, *_served(rollouts), _foot())


def _sites_title(one: SitesDigest, sites: Sequence[SitesDigest]) -> str:
    return "Sites" if len(sites) == 1 else f"Sites of {one.name.removesuffix(' (all sites)')}"


def _top(runs: Sequence[Digest], title: str) -> Markup:
    return element("header", element("h1", title), _runs(runs))


def _runs(runs: Sequence[Digest]) -> Markup:
    """Return which curve is of which run, with what the run is."""
    items = [
        element("li", key(colour), element("b", name), element("span", _kind(run)))
        for colour, (name, run) in enumerate(zip(names(runs), runs, strict=True))
    ]
    return element("ul", *items, class_="runs")


def _kind(run: Digest) -> str:
    place = f"live, wall seconds, {run.started}" if run.live else "replay, virtual seconds"
    algorithm, model = (formatting.spec_text(spec) for spec in (run.plan.algorithm, run.plan.model))
    return f"{algorithm} · {model} · seed {run.plan.seed} · {place}"


def _sections(runs: Sequence[Digest], targets: Sequence[float]) -> list[Markup]:
    compared = " Small figures: against the first run." if len(runs) > 1 else ""
    mixed = " Wall seconds and virtual seconds stand side by side here." if len({*map(clock, runs)}) > 1 else ""
    outcome = _section("Outcome", summary(runs), f"Joules and bytes are of all devices and rounds.{compared}{mixed}")
    reached = _section(
        "To a given accuracy",
        targets_table(runs, targets) if targets else element("p", "No run's model was evaluated on test data."),
        "What a run had taken by the end of the first round after which its model was at least so accurate.",
    )
    return [
        element("div", outcome, reached, class_="two" if len(runs) < WIDE else None),
        _section("Accuracy and loss", joined(_runs(runs), progress(runs)) if len(runs) > 1 else progress(runs)),
        *(_section("Accuracy by class and by device", content) for content in accuracy(runs)),
        _section("Timeline of rounds", _each(runs, timeline)),
        _section("Time and energy of the devices", _each(runs, spent)),
        _section("Decisions", _each(runs, decisions)),
        _section("Facts", facts_table(runs)),
    ]


def _served(rollouts: Sequence[RolloutState]) -> list[Markup]:
    note = "Releases of these runs that were offered to the boards of the site, as their journals have it."
    return [_section("Rollouts", rollouts_section(rollouts), note)] if rollouts else []


def _section(title: str, content: str, note: str = "") -> Markup:
    return element("section", element("h2", title), element("p", note, class_="note") if note else "", content)


def _each(runs: Sequence[Digest], show: Callable[[Digest], Markup]) -> Markup:
    """Return something of every run, one below the other."""
    return joined(
        *(
            element("article", element("h3", name) if len(runs) > 1 else "", show(run))
            for name, run in zip(names(runs), runs, strict=True)
        )
    )


def _foot() -> Markup:
    return element(
        "footer", element("p", formatting.LEGEND), element("p", f"Made by fieldfleet {version('fieldfleet')}.")
    )
