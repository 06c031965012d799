"""Runs side by side: what they came to, what they took to an accuracy, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from edge_server.report import formatting
from edge_server.report import targets as compare
from edge_server.report.charts import key
from edge_server.report.digest import ARRIVALS, Amount, Digest, Moved
from edge_server.report.html import NOTHING, Markup, element, joined

OWN = "the devices' own models"
MOST_DEVICES = 20
"""Devices of a plan that are shown of it."""


def clock(run: Digest) -> str:
    """Return of what clock a run's seconds are."""
    return "wall" if run.live else "virtual"


def seconds_of(runs: Sequence[Digest]) -> str:
    """Return the name of the seconds of all of them."""
    return f"seconds ({' or '.join(sorted({clock(run) for run in runs}))})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], class_: str | None = None) -> Markup:
    """Return a table that scrolls sideways where the page is too narrow; the first cell of a row is its name.

    Args:
        head: Names of the columns.
        rows: Cells, as markup or text.
        class_: Class of the table on the page.
    """
    top = element("tr", *(element("th", one, scope="col") for one in head))
    body = [element("tr", element("th", row[0], scope="row"), *(element("td", one) for one in row[1:])) for row in rows]
    whole = element("table", element("thead", top), element("tbody", *body), class_=class_)
    return element("div", whole, class_="wide", tabindex="0")


def figure_with_change(text: str, change: str) -> Markup:
    """Return a figure, and below it how far it is from the first run's."""
    return joined(text, element("small", change)) if change else joined(text)


def summary(runs: Sequence[Digest]) -> Markup:
    """Return what every run came to, and how far that is from the first."""
    spent = [run.rounds[-1].until if run.rounds else None for run in runs]
    lasts = [compare.last_evaluated(run) for run in runs]
    rows = [
        ["outcome", *(_words(f"{run.outcome}: {run.cause}" if run.cause else run.outcome) for run in runs)],
        ["rounds", *(f"{len(run.rounds)} of {run.plan.rounds}" for run in runs)],
        ["accuracy at the end", *_shares([one.accuracy if one else None for one in lasts])],
        ["best accuracy", *_shares([compare.best_accuracy(run) for run in runs])],
        *(
            [row, *_shares([one.global_accuracy if one else None for one in lasts])]
            for row in ["accuracy of the aggregated model"] * any(run.personal for run in runs)
        ),
        ["loss at the end", *_losses([one.test_loss if one else None for one in lasts])],
        *(
            ["accuracy is of", *(_words(OWN if run.personal else "the aggregated model") for run in runs)]
            for _ in range(any(run.personal for run in runs))
        ),
        ["accuracy on devices", *_shares([run.device_accuracy for run in runs])],
    ]
    for name, kind, heading in _spent(runs):
        amounts = [getattr(one, name) if one else Amount() for one in spent]
        rows.append([heading, *_amounts(runs, amounts, kind)])
    rows += [
        [f"updates {arrival}", *(str(sum(getattr(one, arrival) for one in run.rounds)) for run in runs)]
        for arrival in ARRIVALS
    ]
    return table(["", *heads(runs)], rows, class_="summary")


def _words(text: str) -> Markup:
    """Return text that may be broken between its words, unlike a figure and its unit."""
    return element("span", text, class_="words")


def _spent(runs: Sequence[Digest]) -> list[tuple[str, str, str]]:
    """Return what is said of what runs took: its name in `Spending`, its kind, its heading."""
    found = [("seconds", "seconds", seconds_of(runs)), ("joules", "joules", "joules")]
    found += [
        (name, "bytes", formatting.bytes_label(name, split=_any_split(runs))) for name in Moved.__struct_fields__[:2]
    ]
    if not any(run.traffic[2:] for run in runs):
        return found
    exchanged = [
        (name, "bytes", formatting.bytes_label(name, split=True))
        for name in Moved.__struct_fields__[2:]
        if any(name in run.traffic for run in runs)
    ]
    return [*found, *exchanged, ("bytes", "bytes", "bytes in all")]


def _any_split(runs: Sequence[Digest]) -> bool:
    return any(run.split for run in runs)


def heads(runs: Sequence[Digest]) -> list[Markup]:
    """Return the runs' names as heads of columns, each with its curve."""
    return [joined(key(colour), name) for colour, name in enumerate(names(runs))]


def names(runs: Sequence[Digest]) -> list[str]:
    """Return the runs' names, each with its number."""
    return [f"{index}. {run.run}" for index, run in enumerate(runs, 1)] if len(runs) > 1 else [run.run for run in runs]


def targets_table(runs: Sequence[Digest], targets: Sequence[float]) -> Markup:
    """Return the rounds, seconds, joules and bytes that every run took to each accuracy."""
    rows: list[list[str]] = []
    for target in targets:
        found = compare.comparison(runs, [target])
        columns = [
            _amounts(runs, [getattr(one, kind) for one in found], kind) for kind in ("seconds", "joules", "bytes")
        ]
        for index, name in enumerate(names(runs)):
            number = str(found[index].round or NOTHING)
            why = "" if found[index].round else _short(runs[index])
            rows.append(
                [
                    formatting.share(target),
                    figure_with_change(name, why),
                    number,
                    *(column[index] for column in columns),
                ]
            )
    return table(["accuracy", "run", "round", seconds_of(runs), "joules", "bytes"], rows, class_="targets")


def _short(run: Digest) -> str:
    top = compare.best_accuracy(run)
    return "never evaluated" if top is None else f"not reached; best {formatting.share(top)}"


def _shares(values: Sequence[float | None]) -> list[Markup]:
    changes = [formatting.change_of_share(one, values[0]) for one in values]
    return _cells([formatting.share(one) for one in values], changes)


def _losses(values: Sequence[float | None]) -> list[Markup]:
    return _cells(
        [formatting.format_loss(one) for one in values], [formatting.change(one, values[0]) for one in values]
    )


def _amounts(runs: Sequence[Digest], amounts: Sequence[Amount], kind: str) -> list[Markup]:
    """Return amounts and their changes: none between a bound and a figure, none between two kinds of clock."""
    base, texts = amounts[0], [formatting.amount(one, kind) for one in amounts]
    if kind == "seconds" and len({run.live for run in runs}) > 1:
        return [figure_with_change(text, clock(run)) for text, run in zip(texts, runs, strict=True)]
    changes = [formatting.change(one.value, base.value) if one.whole and base.whole else "" for one in amounts]
    return _cells(texts, changes)


def _cells(texts: Sequence[str], changes: Sequence[str]) -> list[Markup]:
    """Return cells of which all but the first, which is what they are compared with, say their change."""
    pairs = zip(texts, ("", *changes[1:]), strict=True)
    return [figure_with_change(text, change) for text, change in pairs]


FACTS: Sequence[tuple[str, Callable[[Digest], str]]] = (
    ("trial", lambda run: run.plan.name),
    ("kind", lambda run: f"live, {clock(run)} seconds" if run.live else f"replay, {clock(run)} seconds"),
    ("started", lambda run: run.started or NOTHING),
    ("algorithm", lambda run: formatting.spec_text(run.plan.algorithm)),
    ("model", lambda run: formatting.spec_text(run.plan.model)),
    ("codec", lambda run: formatting.spec_text(run.plan.codec)),
    ("training", lambda run: formatting.section(run.plan.hyper)),
    ("data", lambda run: f"{run.plan.data.source} {run.plan.data.path}".strip() if run.plan.data else "the devices'"),
    ("partition", lambda run: formatting.section(run.plan.partition)),
    ("cohort", lambda run: formatting.section(run.plan.cohort)),
    ("a round ends", lambda run: formatting.section(run.plan.round)),
    ("budget", lambda run: formatting.section(run.plan.budget) or "none"),
    ("seed", lambda run: str(run.plan.seed)),
    ("versions", lambda run: ", ".join(f"{name} {one}" for name, one in sorted(run.versions.items())) or NOTHING),
    ("agents", lambda run: _all(one.version for one in run.devices)),
    ("devices that took part", lambda run: str(len(run.devices))),
    ("boards", lambda run: _all(one.board for one in run.devices)),
    ("processes of the server", lambda run: str(run.servers or NOTHING)),
    (
        "times that devices went away",
        lambda run: str(sum(one.went_away for one in run.devices)) if run.servers else NOTHING,
    ),
    ("joules of measuring before round 1", lambda run: formatting.amount(run.measuring, "joules")),
    ("went back after a lost checkpoint", lambda run: f"{run.went_back} times"),
    ("not taken by the server", lambda run: _counts(run) or "nothing"),
    ("notes", lambda run: "; ".join(run.notes) or "none"),
)


def _all(words_: Iterable[str]) -> str:
    return ", ".join(sorted({*words_} - {""})) or NOTHING


def _counts(run: Digest) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in run.refused.items())


def facts_table(runs: Sequence[Digest]) -> Markup:
    """Return what the runs are, and their plans in full; what differs between them stands out."""
    rows = []
    for name, of in FACTS:
        said = [of(run) for run in runs]
        rows.append([name, *(element("b", one) if len(set(said)) > 1 else one for one in said)])
    plans = [
        element(
            "details",
            element("summary", f"Plan of {name}"),
            element("pre", *_lines(run)),
        )
        for name, run in zip(names(runs), runs, strict=True)
    ]
    return joined(table(["", *heads(runs)], rows, class_="facts"), *plans)


def _lines(run: Digest) -> list[Markup]:
    """Return a plan as lines of JSON, each of them escaped on its own; of many devices, the first."""
    devices = run.plan.device
    plan = msgspec.structs.replace(run.plan, device=devices[:MOST_DEVICES])
    lines = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode().splitlines()
    if len(devices) > MOST_DEVICES:
        lines.append(f"and {len(devices) - MOST_DEVICES} more devices")
    return [part for line in lines for part in (joined(line), Markup("\n"))]
