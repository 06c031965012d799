"""Self-contained HTML report of one or several runs: no scripts, fonts or network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version

from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.rollouts.state import RolloutState
from edge_server.report import formatting
from edge_server.report.charts import key
from edge_server.report.digest import Digest, common_metric, metric_name
from edge_server.report.html import Markup, document, element, join
from edge_server.report.sections.accuracy import accuracy
from edge_server.report.sections.decisions import decisions
from edge_server.report.sections.progress import progress
from edge_server.report.sections.rollouts import rollouts as rollouts_section
from edge_server.report.sections.sites import sites as sites_section
from edge_server.report.sections.time_energy import time_and_energy
from edge_server.report.sections.timeline import timeline
from edge_server.report.sites.digest import SitesDigest
from edge_server.report.tables import clock_kind, facts_table, run_names, summary_table, targets_table
from edge_server.report.targets import default_targets as usual_targets

WIDE = 3
"""Runs from which the outcome table takes the whole width."""


def render_page(
    runs: Sequence[Digest],
    targets: Sequence[float] = (),
    rollouts: Sequence[RolloutState] = (),
    sites: Sequence[SitesDigest] = (),
) -> str:
    """Return the report of one run, or of several side by side.

    Args:
        runs: The others are compared with the first.
        targets: Accuracies from 0 to 1; empty for round ones that every run reached.
        rollouts: Rollouts of releases of these runs.
        sites: Digests of those runs that are sites of one plan.
    """
    accuracies = list(targets) or usual_targets(runs)
    title = f"Run {runs[0].run}" if len(runs) == 1 else f"{len(runs)} runs side by side"
    outcome, *others = _sections(runs, accuracies)
    site_sections = [
        _section("sites" if number == 1 else f"sites-{number}", _sites_title(digest, sites), sites_section(digest))
        for number, digest in enumerate(sites, 1)
    ]
    return document(title, [_header(runs, title), outcome, *site_sections, *others, *_rollouts(rollouts), _footer()])


def _sites_title(digest: SitesDigest, sites: Sequence[SitesDigest]) -> str:
    return "Sites" if len(sites) == 1 else f"Sites of {digest.name.removesuffix(' (all sites)')}"


def _header(runs: Sequence[Digest], title: str) -> Markup:
    return element("header", [element("h1", title), _runs(runs)])


def _runs(runs: Sequence[Digest]) -> Markup:
    items = [
        element("li", [key(colour), element("b", name), element("span", _describe_run(run))])
        for colour, (name, run) in enumerate(zip(run_names(runs), runs, strict=True))
    ]
    return element("ul", items, class_="runs")


def _describe_run(run: Digest) -> str:
    kind = f"live, wall seconds, {run.started}" if run.live else "replay, virtual seconds"
    algorithm, model = (formatting.format_spec(spec) for spec in (run.plan.algorithm, run.plan.model))
    return f"{algorithm} · {model} · seed {run.plan.seed} · {kind}"


def _sections(runs: Sequence[Digest], targets: Sequence[float]) -> list[Markup]:
    change_note = " Small numbers: change from the first run." if len(runs) > 1 else ""
    clock_note = " Wall and virtual seconds are mixed." if len({*map(clock_kind, runs)}) > 1 else ""
    outcome = _section(
        "outcome",
        "Outcome",
        summary_table(runs),
        f"Joules and bytes are of all devices and rounds.{change_note}{clock_note}",
    )
    metric = common_metric(runs)
    name = "an accuracy" if metric == ACCURACY else f"a value of {metric_name(runs)}"
    heading = "Accuracy" if metric == ACCURACY else metric_name(runs)
    cost_section = _section(
        "targets",
        f"Cost to reach {name}",
        targets_table(runs, targets) if targets else element("p", "No run's model was evaluated on test data."),
        f"Resources used by the end of the first round whose model reached the {metric_name(runs)}.",
    )
    return [
        element("div", [outcome, cost_section], class_="two" if len(runs) < WIDE else None),
        _section("progress", "Accuracy and loss" if metric == ACCURACY else "Metrics and loss", render_progress(runs)),
        *(_section("accuracy", f"{heading} by class and by device", content) for content in accuracy(runs)),
        _section("timeline", "Timeline of rounds", _each(runs, timeline)),
        _section("time-energy", "Time and energy of the devices", _each(runs, time_and_energy)),
        _section("decisions", "Decisions", _each(runs, decisions)),
        _section("facts", "Facts", facts_table(runs)),
    ]


def render_progress(runs: Sequence[Digest]) -> Markup:
    """Return the curves of accuracy and loss, with a legend for several runs."""
    return join([_runs(runs), progress(runs)]) if len(runs) > 1 else progress(runs)


def _rollouts(rollouts: Sequence[RolloutState]) -> list[Markup]:
    note = "Releases of these runs that were rolled out at the site, from the journals of rollouts."
    return [_section("rollouts", "Rollouts", rollouts_section(rollouts), note)] if rollouts else []


def _section(name: str, title: str, content: str, note: str = "") -> Markup:
    """Return a section; its name is the fragment of its address, `report.html#outcome`."""
    note_element = element("p", note, class_="note") if note else ""
    return element("section", [element("h2", title), note_element, content], id=name)


def _each(runs: Sequence[Digest], show: Callable[[Digest], Markup]) -> Markup:
    return join(
        (
            element("article", [element("h3", name) if len(runs) > 1 else "", show(run)])
            for name, run in zip(run_names(runs), runs, strict=True)
        )
    )


def _footer() -> Markup:
    return element(
        "footer", [element("p", formatting.LEGEND), element("p", f"Made by fieldfleet {version('fieldfleet')}.")]
    )
