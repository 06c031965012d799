"""Files that people or a disk hand us: data sets, traces, profiles, calibrations, entries of an outbox, journals."""

from __future__ import annotations

import gzip
import shutil
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from device_agent.measurement import calibration_file
from device_agent.measurement.calibration_file import Calibration
from device_agent.profile.load import load_file, read_source
from edge_server.journal import sqlite
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.report_history import FILE as REPORTS
from edge_server.journal.report_history import ReportHistory, StoredReport, latest_reports
from edge_server.journal.stream import decode_body
from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import TraceLink
from edge_server.replay.devices.build import build_behaviour
from edge_server.replay.trace import files as traces
from edge_server.replay.trace.import_run import to_records
from edge_server.replay.trace.transfer import export
from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError, CorruptFile, FieldFleetError, WireError
from shared.protocol import payload
from shared.protocol.messages import Transfer, Update
from tests.device_agent.sources import report
from tests.edge_server.report.journals import field_run
from tests.fuzz.frames import folder

_places = count()
TABLES = [f"{name}.csv" for name in ("tasks", "steps", "rounds", "decisions", "readings", "facts", "availability")]


@dataclass(frozen=True)
class Files:
    """Some files in a folder, of which one is damaged.

    Attributes:
        make: Writes all of them.
        name: The one that is damaged; of several, separated by spaces, the first byte of an input says which.
        refusal: The error that says they are not as they should be.
    """

    make: Callable[[Path], object]
    name: str
    load: Callable[[Path], object]
    refusal: type[FieldFleetError] = ConfigError

    @cached_property
    def _good(self) -> dict[str, bytes]:
        place = _new_folder()
        self.make(place)
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def seeds(self) -> list[bytes]:
        """Return the file, or each of them, as it should be."""
        names = self.name.split()
        return [bytes([number] * (len(names) > 1)) + self._good[name] for number, name in enumerate(names)]

    def _damaged(self, data: bytes) -> tuple[str, bytes]:
        names = self.name.split()
        return (names[(data[0] if data else 0) % len(names)], data[1:]) if len(names) > 1 else (self.name, data)

    def read(self, data: bytes) -> str:
        """Something that can be used, or the one error, in one line."""
        place = _new_folder()  # some readers remember what they read by its path
        for name, content in (self._good | dict([self._damaged(data)])).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        try:
            found = self.load(place)
        except self.refusal as error:
            return f"refused: {str(error).replace(f'{place}/', '')}"
        finally:
            shutil.rmtree(place)
        return f"accepted: {type(found).__name__}"


def _new_folder() -> Path:
    place = folder() / str(next(_places))
    place.mkdir()
    return place


def _examples(place: Path, source: str, name: str = "") -> object:
    found = load(Data(source=source, path=str(place / name)))
    assert found.inputs.isfinite().all()
    assert len(found.labels) == len(found.inputs)
    assert found.labels.min() >= 0
    return found


def _arrays(place: Path) -> None:
    np.savez(place / "examples.npz", x=np.arange(12.0).reshape(4, 3), y=np.array([0, 1, 1, 2]))


def _idx(place: Path, suffix: str) -> None:
    pictures = struct.pack(">4B3I", 0, 0, 8, 3, 3, 2, 4) + bytes(range(24))
    written = gzip.compress(pictures, mtime=0) if suffix else pictures
    (place / f"train-images-idx3-ubyte{suffix}").write_bytes(written)
    (place / "train-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([2, 0, 1]))


def _picture(place: Path) -> None:
    (place / "a").mkdir()
    Image.effect_noise((8, 8), 60).save(place / "a" / "1.png")


def _link(place: Path) -> object:
    return build_behaviour(DevicePlan(name="a", link=TraceLink(path=str(place / "link.csv"))), 0, 0)


def _entry(place: Path) -> None:
    box, data = Outbox(place / "outbox", place / "states"), b"moved" * 8
    draft = box.draft("trial", 1)
    (draft / outbox.PAYLOAD).write_bytes(data)
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=1024)
    outbox.write(draft, Update(run="trial", round=1, device="board", params=transfer))
    box.commit(draft)


def _entries(place: Path) -> object:
    """Return what waits, after the check with which an agent begins."""
    (place / "states").mkdir(exist_ok=True)
    box = Outbox(place / "outbox", place / "states")
    box.check()
    if not box.entries():
        raise CorruptFile("set aside")
    return box.entries()


def _trace(place: Path) -> None:
    with closing(SqliteStore(place / "runs" / "field-1", durable=False)) as store:
        store.extend(field_run(place))
    export(place / "runs", "field-1", place / "trace", place)
    for path in (place / "runs", place / "plan.toml"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_trace(place: Path) -> object:
    """Return a trace that is sound: its records make a journal that is read as it was written."""
    trace = traces.read(place / "trace")
    rows = list(sqlite.marked_rows(to_records(trace), 0, sqlite.encode))
    assert list(sqlite.marked_rows(map(decode_body, (body for body, _ in rows)), 0, sqlite.encode)) == rows
    return trace


def _journal(place: Path) -> None:
    with closing(SqliteStore(place / "run", durable=False)) as store:
        store.extend(field_run(place))
    (place / "plan.toml").unlink()


def _read_run(place: Path) -> object:
    """Return what a journal holds: what was written, or its beginning, and never anything else."""
    found = sqlite.read_records(place / "run")
    if not found:
        raise CorruptFile("it is only being made")
    assert found == field_run(place)[: len(found)]
    return found


def _calibration(place: Path) -> None:
    calibration_file.save_calibration(
        place, Calibration(profile="pi", meter="plug", stamp="20260101", residual_w=0.1, r_squared=1)
    )


def _reports(place: Path) -> None:
    history = ReportHistory(place, keep_days=14, max_bytes=1 << 20)
    random = Random(1)
    history.write([StoredReport(1.8e9 + second, report(random, 100.0 + second)) for second in range(5)])
    history.close()


FILES = {
    "npz": Files(_arrays, "examples.npz", partial(_examples, source="npz", name="examples.npz")),
    "idx": Files(partial(_idx, suffix=""), "train-images-idx3-ubyte", partial(_examples, source="idx")),
    "idx.gz": Files(partial(_idx, suffix=".gz"), "train-images-idx3-ubyte.gz", partial(_examples, source="idx")),
    "csv": Files(
        lambda place: (place / "table.csv").write_text("label,v\n2,-0.5\n0,7\n"),
        "table.csv",
        partial(_examples, source="csv", name="table.csv"),
    ),
    "picture": Files(_picture, "a/1.png", partial(_examples, source="folder")),
    "link trace": Files(
        lambda place: (place / "link.csv").write_text("trace,t_s,mbps\nx,0,1\nx,1,2.5\ny,0,3\n"), "link.csv", _link
    ),
    "trace": Files(_trace, " ".join(f"trace/{name}" for name in ("trace.json", *TABLES)), _read_trace),
    "profile": Files(
        lambda place: (place / "pi.toml").write_text(read_source("raspberry-pi-4b")),
        "pi.toml",
        lambda place: load_file(place / "pi.toml"),
    ),
    "calibration": Files(_calibration, calibration_file.FILE_NAME, calibration_file.load_calibration, CorruptFile),
    "update": Files(
        _entry,
        f"outbox/trial@000001/{outbox.UPDATE}",
        lambda place: outbox.read(place / "outbox" / "trial@000001"),
        WireError,
    ),
    "update's payload": Files(_entry, f"outbox/trial@000001/{outbox.PAYLOAD}", _entries, CorruptFile),
    "run": Files(_journal, f"run/{sqlite.JOURNAL}", _read_run, CorruptFile),
    "reports": Files(_reports, REPORTS, lambda place: latest_reports(place / REPORTS), CorruptFile),
}
