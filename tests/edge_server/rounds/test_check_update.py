"""Stored updates: what a round keeps of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed
from edge_server.rounds.check_plan import load
from edge_server.rounds.check_update import prune_updates
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.textbook import DEVICES


def test_what_is_kept_grows_with_the_cohort(tmp_path):
    """Devices of the round keep theirs, or get a file to overwrite; notes of others, and what is left over, go."""
    for name in ("a", "b", "c", "d", ".b", ".a"):
        (tmp_path / name).write_text(name)
    prune_updates(tmp_path, {"a", "x"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "a", ".a": ".a", "x": "b"}
    prune_updates(tmp_path / "nothing", {"a"})


class LeavingStore(SqliteStore):
    """A store in which a device leaves after each round; says whether its update is there after the evaluation."""

    stored: tuple[bool, ...] = ()

    def extend(self, records: Sequence[AnyRecord], *args: Any, **options: Any) -> None:
        super().extend(records, *args, **options)
        for record in records:
            path = self.updates / "gone"
            if isinstance(record, RoundClosed):
                path.write_bytes(b"its update")
            if isinstance(record, Evaluated):
                self.stored += (path.exists(),)


def test_updates_stay_until_the_next_round_has_begun(tmp_path):
    """The end of their round may not be on the disk yet while the devices evaluate its model."""
    sections = {
        "evaluation": "every = 0\ndevices_every = 1",
        "data": f"{write_examples(tmp_path)}\nholdout = 0.4",
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }',
    }
    path = write_plan(tmp_path, cohort="min_devices = 3", more=f'[partition]\nkind = "even"\n{DEVICES}', **sections)
    here, store = Site(Network(), load(path, tmp_path), tmp_path), LeavingStore(tmp_path / "run", durable=False)
    here.play(lambda: here.serve(store))
    assert store.stored == (True, True)
    assert not (tmp_path / "run" / "updates" / "gone").exists()
