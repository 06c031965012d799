"""Tasks of pruned personalization behind slow links against their T_th: `make bench NAME=shares`, as root, two minutes.

Four agents with real trainers, each in a network namespace whose link passes 1 to 5 Mbit/s, what it would pass with the
whole uplink, and in a control group that gets 25 to 50 % of a core; the coordinator shares the uplink out. Without
pruning T_th would be missed by far. A task's seconds are those of (24) of the paper, computing and the upload, as the
device says that it took; of the first rounds, before which nothing was measured, only how they went is told.
Nothing else should run meanwhile: nobody predicts what other processes take of the boards' computing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gap import Board, lack, live
from measure import Figure, NotRun, Row
from rich.console import Console
from rich.table import Table

from edge_server.allocation.explain import explain
from edge_server.allocation.explanation_text import explanation_lines
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import RoundOpened, drop_void
from edge_server.journal.sqlite import read_records
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared.protocol.measurements import Cost

QUICK_ROUNDS = 3
ROUNDS, FIRST, DEADLINE_S = int(os.environ.get("ROUNDS", "10")), 2, float(os.environ.get("DEADLINE_S", "2"))
MOST_LIVE, MOST_REPLAYED = 1.1, 1.0
BURST = "5kb"
"""A link that passes more at once after every pause would seem faster to who pauses between frames."""

KEEP = os.environ.get("KEEP", "")
BOARDS = (Board("near", 5, 0.25), Board("porch", 3, 0.5), Board("roof", 2, 0.5), Board("field", 1, 0.5))
PLAN = """
name = "shares"
rounds = {rounds}
seed = 1
[algorithm]
name = "pruned_personalization"
[model]
name = "cnn"
options = {{ side = 8, width = 32, hidden = 128 }}
[hyper]
batch_size = 128
learning_rate = 0.02
[optimizer]
name = "bandwidth"
options = {{ deadline_s = {deadline_s}, compute = "dense", margin = 0.02{options} }}
[measure]
seconds = 1.0
[cohort]
min_devices = {count}
[round]
deadline_s = 60
[evaluation]
every = 0
[data]
source = "digits"
[partition]
kind = "shards"
{devices}
"""
DEVICE = """[[device]]
name = "{name}"
compute = {{ kind = "ranges", hertz = 1.5e9, cycles_per_weight = 400.0 }}
link = {{ kind = "given", up_mbit_s = {mbit}, down_mbit_s = {mbit}, delay_s = 0.002 }}
"""
BARE = '[[device]]\nname = "{name}"\n'


def text(rounds: int, *, known: bool, options: str = "") -> str:
    """Return the plan; without what it tells of links, agents have to find that out."""
    devices = "".join((DEVICE if known else BARE).format(name=board.name, mbit=board.mbit) for board in BOARDS)
    return PLAN.format(rounds=rounds, deadline_s=DEADLINE_S, count=len(BOARDS), options=options, devices=devices)


def seconds(cost: Cost) -> float | None:
    """Return the seconds of a task by (24) of the paper; None where its device did not tell them."""
    known = cost.compute_s is not None and cost.upload_s is not None
    return (cost.compute_s or 0.0) + (cost.upload_s or 0.0) if known else None


def worst(folder: Path, title: str) -> list[float]:
    """Return of each round the longest task over T_th, and print what each device was given and took."""
    records = read_records(folder)
    opened = {one.round: one.decision for one in drop_void(records) if isinstance(one, RoundOpened)}
    table = Table("round", *(board.name for board in BOARDS), "longest / T_th", box=None, title=title)
    found = []
    for number, costs in sorted(costs_by_round(records).items()):
        if not (decision := opened.get(number)):
            continue  # before round 1, or an evaluation
        taken = {name: spent / DEADLINE_S for name, cost in costs.items() if (spent := seconds(cost)) is not None}
        found.append(max(taken.values()))
        cells = []
        for board in BOARDS:
            given = decision.devices[board.name]
            rate = given.figures["up_bits_per_s"]
            share, pruned = (float(str(given.values[name])) for name in ("share", "prune"))
            cells.append(
                f"{taken.get(board.name, float('nan')):.3f} share {share:.2f} pruned {pruned:.2f}"
                f" {rate.value / 1e6:.2f} Mbit/s {rate.source}"
            )
        table.add_row(str(number), *cells, f"{found[-1]:.3f}")
    Console(width=200).print(table)
    return found


def run(*, quick: bool = False) -> list[Row]:
    """Run the plan live with and without the links' rates told, and replay it; quickly only with, a few rounds."""
    if reason := lack():
        return [NotRun("shares", reason)]
    rounds, figures = QUICK_ROUNDS if quick else ROUNDS, list[Row]()
    with tempfile.TemporaryDirectory(prefix="shares-") as name:
        root = Path(KEEP or name)
        for case, known in (("rates told", True), ("rates found out", False))[: 1 if quick else 2]:
            folder = root / case.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            found = worst(live(folder, BOARDS, text=text(rounds, known=known), burst=BURST), f"live, {case}")[FIRST:]
            figures.append(Figure(f"shares, live, {case}: longest task / T_th", max(found), "", f"<= {MOST_LIVE}"))
        found = worst(_replayed(root, rounds), "replayed")[FIRST:]
        figures.append(Figure("shares, replayed: longest task / T_th", max(found), "", f"<= {MOST_REPLAYED}"))
        console = Console(width=120)
        for line in explanation_lines(explain(read_records(root / "rates-told" / "runs" / "live"), rounds)):
            console.print(line, highlight=False)
    return figures


def _replayed(root: Path, rounds: int) -> Path:
    path = root / "plan.toml"
    path.write_text(text(rounds, known=True))
    replay_plan(load(path, root), root / "replayed")
    return root / "replayed"
