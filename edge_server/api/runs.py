"""Stored run: rounds, tasks, devices, data frames, model and plot."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from markupsafe import Markup
from torch import nn

from edge_server.api.figures import RunFigure
from edge_server.journal.compared_metric import ComparedMetric
from edge_server.journal.outcome import RunOutcome, outcome_lines, summarise_outcome
from edge_server.journal.records import AnyRecord
from edge_server.journal.runs import LAST, StoredRun, find_run
from edge_server.plan.data_folder import DATA_DIR
from edge_server.plan.plan import Plan
from edge_server.record.amounts import Amount
from edge_server.release.run_model import read_network
from edge_server.report.digest import DeviceDigest, Digest, RoundDigest, TaskDigest
from edge_server.report.html import clean, render_fragment
from edge_server.report.summarise import digest_run
from edge_server.report.tables import summary_table
from edge_server.report.targets import last_evaluated
from shared.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

Table = Literal["rounds", "tasks", "devices"]
KEYS = ("round", "device", "figure")
"""First columns of a data frame."""


class Run:
    """A run: finished, interrupted or still going on; opened again, it has what was recorded since.

    Attributes:
        folder: Folder of the run, with journal and checkpoints.
        name: Name of the run, by which `open_run` finds it.
        records: Its journal, in order.
    """

    def __init__(self, folder: Path, records: Sequence[AnyRecord]) -> None:
        self.folder, self.name, self.records = folder, folder.name, list(records)

    @property
    def plan(self) -> Plan:
        """Plan of the run, with resolved paths."""
        return self.digest.plan

    @cached_property
    def digest(self) -> Digest:
        """All values of the report; see `edge_server.report.digest`."""
        return digest_run(self.records)

    @property
    def outcome(self) -> RunOutcome:
        """Outcome, rounds, last and best model, failed devices."""
        return summarise_outcome(self.records, self.folder)

    @property
    def accuracy(self) -> float | None:
        """Accuracy after the last evaluated round; None if there is none."""
        return next((entry.accuracy for entry in reversed(self.rounds) if entry.accuracy is not None), None)

    @property
    def metric(self) -> ComparedMetric:
        """Name and direction of the metric by which its models are compared; `accuracy` by default."""
        return self.digest.metric

    @property
    def value(self) -> float | None:
        """This metric after the last evaluated round; None if there is none."""
        last = last_evaluated(self.digest)
        return last.metric_value() if last else None

    @property
    def rounds(self) -> list[RoundDigest]:
        """Ended rounds: accuracy, losses, seconds, joules, bytes, and number of devices."""
        return self.digest.rounds

    @property
    def tasks(self) -> list[TaskDigest]:
        """Tasks: one for each device of a round, with seconds, joules and bytes by activity."""
        return list(self.digest.tasks)

    @property
    def devices(self) -> list[DeviceDigest]:
        """Devices with their sums over all rounds."""
        return self.digest.devices

    def frame(self, table: Table = "rounds") -> pd.DataFrame:
        """Return a table as a pandas data frame: SI units, NaN where a value is unknown.

        Args:
            table: `rounds`, `tasks` or `devices`. Parts of a value have columns of their own, such as
                `seconds.compute`.

        Raises:
            ConfigError: pandas is not installed, or there is no such table.
        """
        if table not in ("rounds", "tasks", "devices"):
            raise ConfigError(f"table {table!r} does not exist; choose 'rounds', 'tasks' or 'devices'")
        return make_frame(getattr(self, table))

    def model(self, round: int | None = None) -> nn.Module:  # noqa: A002 - as the report names it
        """Return the network with its trained weights, in evaluation mode.

        Args:
            round: The round after which; None for the most accurate one that is stored, or the last one if the plan
                keeps that.

        Raises:
            ConfigError: No model of that round is stored, or a part of it is on the devices.
        """
        return read_network(StoredRun(self.folder, self.records), round)[0].layers

    def figure(self) -> RunFigure:
        """Return the report's curves of the run."""
        return RunFigure([self.digest])

    def __repr__(self) -> str:
        outcome, *_ = outcome_lines(self.outcome, self.folder)
        figure = "" if self.value is None else f", {self.metric.name} {self.metric.format(self.value)}"
        return f"<Run {self.name}: {outcome}{figure}>"

    def _repr_html_(self) -> str:
        return render_fragment(Markup("<p>{}</p>{}").format(clean(repr(self)[1:-1]), summary_table([self.digest])))


def open_run(name: str | os.PathLike[str] = LAST, *, data_dir: str | os.PathLike[str] = DATA_DIR) -> Run:
    """Open a stored run.

    Args:
        name: Name of a run or a unique prefix of it, `last`, or the path of its folder.
        data_dir: Folder of runs; `runs` in the current folder by default.

    Raises:
        ConfigError: No run or several match, or its journal cannot be read.
    """
    stored = find_run(Path(data_dir), os.fspath(name))
    return Run(stored.folder, stored.records)


def make_frame(entries: Sequence[msgspec.Struct]) -> pd.DataFrame:
    """Return structs as a pandas data frame, one row each.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - only if it is installed
    except ModuleNotFoundError as error:
        raise ConfigError("frame() needs the Python package 'pandas'; install it: pip install pandas") from error
    frame = pd.DataFrame([dict(_yield_columns(entry)) for entry in entries])
    keys = [name for name in KEYS if name in frame]
    return frame[[*keys, *(name for name in frame if name not in keys)]]


def _yield_columns(entry: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a struct's values by column; those of inner parts follow a dot."""
    for name in entry.__struct_fields__:
        value, column = getattr(entry, name), f"{prefix}{name}"
        match value:
            case Amount():
                yield column, math.nan if value.value is None else value.value
            case msgspec.Struct():
                yield from _yield_columns(value, f"{column}.")
            case Mapping():
                yield from ((f"{column}.{key}", part) for key, part in value.items())
            case list():
                yield from ((f"{column}.{index}", part) for index, part in enumerate(value))
            case None:
                yield column, math.nan
            case _:
                yield column, value
