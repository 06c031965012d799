"""Self-contained HTML report of one or several runs: no scripts, fonts or network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from markupsafe import Markup

from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.rollouts.state import RolloutState
from edge_server.report.digest import Digest, common_metric, metric_name
from edge_server.report.formatting import LEGEND, format_spec
from edge_server.report.html import document, macro, render
from edge_server.report.sections.accuracy import accuracy
from edge_server.report.sections.decisions import decisions
from edge_server.report.sections.progress import progress
from edge_server.report.sections.rollouts import rollouts as rollouts_section
from edge_server.report.sections.sites import sites as sites_section
from edge_server.report.sections.time_energy import time_and_energy
from edge_server.report.sections.timeline import timeline
from edge_server.report.sites.digest import SitesDigest
from edge_server.report.tables import facts_table, run_names, summary_table, targets_table
from edge_server.report.targets import default_targets as usual_targets

WIDE = 3
"""Runs from which the outcome table takes the whole width."""


@dataclass(frozen=True)
class PageSection:
    """Section of the page; its name is the fragment of its address, `report.html#outcome`."""

    name: str
    title: str
    content: Markup
    note: str = ""


def render_page(
    runs: Sequence[Digest],
    targets: Sequence[float] = (),
    rollouts: Sequence[RolloutState] = (),
    sites: Sequence[SitesDigest] = (),
) -> str:
    """Return the report of one run, or of several, which are compared with the first.

    Args:
        targets: Accuracies from 0 to 1; empty for round ones that every run reached.
        rollouts: Rollouts of releases of these runs.
        sites: Digests of those runs that are sites of one plan.
    """
    title = f"Run {runs[0].run}" if len(runs) == 1 else f"{len(runs)} runs side by side"
    sections = [*_site_sections(sites), *_run_sections(runs)]
    if rollouts:
        note = "Releases of these runs that were rolled out at the site, from the journals of rollouts."
        sections.append(PageSection("rollouts", "Rollouts", rollouts_section(rollouts), note))
    content = render(
        "page.html",
        title=title,
        runs=list(zip(run_names(runs), map(_describe_run, runs), strict=True)),
        is_wide=len(runs) >= WIDE,
        top=_outcome_sections(runs, list(targets) or usual_targets(runs)),
        sections=sections,
        footer=(LEGEND, f"Made by fieldfleet {version('fieldfleet')}."),
    )
    return document(title, content)


def _describe_run(run: Digest) -> str:
    kind = f"live, wall seconds, {run.started}" if run.live else "replay, virtual seconds"
    return f"{format_spec(run.plan.algorithm)} · {format_spec(run.plan.model)} · seed {run.plan.seed} · {kind}"


def _outcome_sections(runs: Sequence[Digest], targets: Sequence[float]) -> list[PageSection]:
    change_note = " Small numbers: change from the first run." if len(runs) > 1 else ""
    clock_note = " Wall and virtual seconds are mixed." if len({run.clock for run in runs}) > 1 else ""
    name = metric_name(runs)
    goal = "an accuracy" if common_metric(runs) == ACCURACY else f"a value of {name}"
    costs = targets_table(runs, targets) if targets else Markup("<p>No run's model was evaluated on test data.</p>")
    cost_note = f"Resources used by the end of the first round whose model reached the {name}."
    note = f"Joules and bytes are of all devices and rounds.{change_note}{clock_note}"
    return [
        PageSection("outcome", "Outcome", summary_table(runs), note),
        PageSection("targets", f"Cost to reach {goal}", costs, cost_note),
    ]


def _site_sections(sites: Sequence[SitesDigest]) -> list[PageSection]:
    titles = ["Sites"] if len(sites) == 1 else [f"Sites of {site.name.removesuffix(' (all sites)')}" for site in sites]
    return [
        PageSection(f"sites-{number}" if number > 1 else "sites", title, sites_section(site))
        for number, (title, site) in enumerate(zip(titles, sites, strict=True), 1)
    ]


def _run_sections(runs: Sequence[Digest]) -> list[PageSection]:
    is_share, by_class = common_metric(runs) == ACCURACY, accuracy(runs)
    title = f"{'Accuracy' if is_share else metric_name(runs)} by class and by device"
    return [
        PageSection("progress", "Accuracy and loss" if is_share else "Metrics and loss", render_progress(runs)),
        *([PageSection("accuracy", title, by_class)] if by_class is not None else []),
        PageSection("timeline", "Timeline of rounds", _each(runs, timeline)),
        PageSection("time-energy", "Time and energy of the devices", _each(runs, time_and_energy)),
        PageSection("decisions", "Decisions", _each(runs, decisions)),
        PageSection("facts", "Facts", facts_table(runs)),
    ]


def render_progress(runs: Sequence[Digest]) -> Markup:
    """Return the curves of accuracy and loss, with a legend for several runs."""
    names = [(name, _describe_run(run)) for name, run in zip(run_names(runs), runs, strict=True)]
    legend = macro("run_list")(names) if len(runs) > 1 else ""
    return Markup("{}{}").format(legend, progress(runs))


def _each(runs: Sequence[Digest], show: Callable[[Digest], Markup]) -> Markup:
    names = run_names(runs) if len(runs) > 1 else [""]
    return macro("articles")(list(zip(names, map(show, runs), strict=True)))
