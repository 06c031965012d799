"""Records of a journal, as they stand in a row of its table."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec

from edge_server.journal import sqlite
from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan
from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    EdgeSettled,
    Evaluated,
    Gossiped,
    Joined,
    Left,
    LeftOut,
    Measured,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Sensed,
    ServerBegan,
    UpdateAccepted,
)
from edge_server.journal.stream import decode_row, row_mark
from edge_server.plan.plan import Plan
from shared import config
from shared.errors import CorruptFile
from shared.protocol import wire
from shared.protocol.measurements import Cost, Provenance, StepCost
from shared.protocol.messages import Assignment, Hyper, Update
from tests.fuzz.configs import PLAN
from tests.fuzz.trees import cut_and_spliced, damaged
from tests.fuzz.wires import golden


def seeds() -> list[bytes]:
    """Return one of every record."""
    records: list[AnyRecord] = [
        RunOpened(run="demo-1", plan=config.parse(PLAN.encode(), Plan, Path("demo.toml")), started="20260101T000000Z"),
        Measured(by_device={"a": StepCost(steps=5, seconds=0.25, weights=10, flops=99)}, failed={"b": "no example"}),
        RoundOpened(round=1, assignments={"a": Assignment(seed=7, hyper=Hyper(), values={"rho": 0.5, "on": [1, 2]})}),
        UpdateAccepted(round=1, device="a", update=wire.decode_as(Update, golden()["Update"]), bytes_up=100),
        CostSettled(
            round=1,
            device="a",
            cost=Cost(upload_s=0.5, provenance={"upload_s": Provenance(source="clock", quality="measured")}),
        ),
        RoundClosed(round=1, outcome="aggregated", arrived=("a", "b"), failed={"c": "no\nmemory"}, seconds=1.5),
        Evaluated(accuracy=0.5, by_device={"a": {"eval_accuracy": 0.5}}),
        Rewound(round=1, cause="digest"),
        ServerBegan(at=5.0, run_s=60.0, utc_s=1.7e9, versions={"torch": "2.4"}),
        Joined(device="a", at=5.5, cause="restarted", version="0.1.0"),
        Left(device="a", at=6.0),
        Sensed(device="a", at=6.5, readings={"cpu.f_hertz": 1.5e9}, ages={"cpu.f_hertz": 2.0}, facts={"mode": "15W"}),
        LeftOut(device="a", instance="f00d", cause="no such folder", round=1, at=2.0),
        LeftOut(device="a", instance="f00d", cause="not a word of it", round=1, at=2.0, silent=True),
        Noted(what="a gap"),
        TermBegan(round=2, term=3, at=7.0, cause="gone"),
        Pledged(round=2, term=3, at=7.5, joules=4.5),
        Granted(round=2, term=3, at=8.0, joules=4.25),
        Coordinated(
            round=2, term=3, at=7.75, sites={"roof": ("a",)}, decision=Decision(optimizer="hcef"), grants={"roof": 4.25}
        ),
        EdgeSettled(round=2, site="barn", run="demo-2", on=False, cause="deadline", at=9.0),
        Gossiped(round=2, on=("shed",), off={"barn": "deadline"}, bytes_up={"shed": 9}, seconds=1.5, at=9.5),
        RunClosed(outcome="finished"),
    ]
    return [sqlite.encode(record) for record in records]


def read(data: bytes) -> str:
    """A record or a CorruptFile; what is read is written so that it is read the same."""
    try:
        record = decode_row((1, data, row_mark(data, 0), 0))
    except CorruptFile as error:
        return f"corrupt: {error.__cause__}"
    again = sqlite.encode(record)
    assert decode_row((1, again, row_mark(again, 0), 0)) == record
    return f"accepted: {type(record).__name__}"


def mutate(data: bytes, random: Random) -> bytes:
    """Damage the record's tree, or its text."""
    if random.random() < 0.4:
        return cut_and_spliced(data, random)
    try:
        return msgspec.json.encode(damaged(msgspec.json.decode(data), random))
    except (ValueError, TypeError, RecursionError):
        return cut_and_spliced(data, random)
