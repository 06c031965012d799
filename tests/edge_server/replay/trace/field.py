"""A journal in which everything happened that a field trial's may hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    Joined,
    Left,
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
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.protocol.measurements import Cost, Provenance, StepCost
from shared.protocol.messages import Assignment, Hyper, Transfer, Update
from tests.edge_server.harness import write_plan

BEGAN = 1000.0
HYPER = Hyper(local_epochs=2, batch_size=16, learning_rate=0.1, momentum=0.5)
METER = Provenance(source="ina3221", quality="measured", uncertainty=0.02)
WALL = Provenance(source="monotonic clock", quality="measured")
MODEL = Provenance(source="power model", quality="modelled")


def plan(folder: Path) -> Plan:
    """Return the plan of the journal, with two of its devices named."""
    more = '[[device]]\nname = "pi-9"\n[[device]]\nname = "orin"'
    return load(write_plan(folder, rounds=2, more=more), folder)


def cost(device: str, round_: int) -> Cost:
    """Return what a task cost, upload included; the Pi has no power sensor."""
    has_sensor = device == "orin"
    return Cost(
        download_s=0.4,
        compute_s=2.5 + round_,
        upload_s=0.8,
        exchange_s=0.3 if has_sensor else None,
        cpu_s=2.0,
        cycles=3.0e9,
        bytes_down=4000,
        bytes_up=4100,
        compute_joules=20.25 if has_sensor else None,
        upload_joules=3.5 if has_sensor else None,
        exchange_joules=1.5 if has_sensor else None,
        features_bytes=9000 if has_sensor else None,
        gradient_bytes=8000 if has_sensor else None,
        idle_w=2.0 if has_sensor else None,
        provenance={
            "compute_s": WALL,
            "upload_s": WALL,
            "cycles": MODEL,
            **({"compute_joules": METER} if has_sensor else {}),
        },
    )


def update(device: str, round_: int, **changes: object) -> Update:
    """Return what a device sent in a round."""
    known = {
        "run": "field-1",
        "round": round_,
        "device": device,
        "params": Transfer(digest=bytes(range(16)), size=4000, frame_bytes=262144),
        "start": b"\x01" * 16,
        "weight": 40.0,
        "num_examples": 40,
        "loss": 0.75 / round_ if round_ else None,
        "metrics": {"eval_accuracy": 0.5, "eval_examples": 10.0},
    }
    return Update(**(known | changes))


def opened(round_: int, devices: tuple[str, ...], at: float) -> RoundOpened:
    """Return a round's beginning."""
    told = {
        name: Assignment(seed=7 + place, hyper=HYPER, steps=3 if round_ == 2 else 0, values={"rho": 0.5, "on": [1, 2]})
        for place, name in enumerate(devices)
    }
    return RoundOpened(round=round_, assignments=told, at=BEGAN + at, online=len(devices))


def closed(round_: int, at: float, **changes: object) -> RoundClosed:
    """Return a round's end."""
    known = {
        "round": round_,
        "outcome": "aggregated",
        "arrived": ("orin",),
        "loss": 0.5,
        "accuracy": 0.625,
        "test_loss": 0.9,
        "seconds": 12.5,
        "bytes_up": {"orin": 4050},
        "bytes_down": {"orin": 4000},
        "at": BEGAN + at,
    }
    return RoundClosed(**(known | changes))


def field_run(folder: Path) -> list[AnyRecord]:
    """Return the journal of two rounds, a restart of the server and a lost checkpoint."""
    first = [
        RunOpened(run="field-1", plan=plan(folder), started="20260101T000000Z"),
        ServerBegan(at=BEGAN, run_s=0.0, utc_s=1.7e9, versions={"python": "3.12.1", "torch": "2.4.0"}),
        Joined(device="orin", at=BEGAN, version="0.1.0"),
        Joined(device="pi-10", at=BEGAN + 1.5, version="0.1.0"),
        UpdateAccepted(
            round=0,
            device="orin",
            update=update("orin", 0, params=None, weight=0.0, num_examples=0, loss=None),
            bytes_up=0,
            at=BEGAN + 4.0,
        ),
        Measured(
            by_device={
                "orin": StepCost(
                    steps=40, seconds=0.05, joules=0.4, weights=700, flops=9000, provenance={"cycles": MODEL}
                )
            },
            metrics={"orin": {"eval_accuracy": 0.5, "eval_examples": 10.0}},
            failed={"pi-9": "no memory,\nnone"},
        ),
        opened(1, ("orin", "pi-10", "pi-9"), 5.0),
        Joined(device="pi-9", at=BEGAN + 5.5),
        Left(device="pi-10", at=BEGAN + 8.0),
        Sensed(
            device="orin",
            at=BEGAN + 9.0,
            readings={"cpu.f_hertz": 1.5e9, "thermal.hottest_celsius": -3.5, "power.total_watts": 4.25},
            ages={"power.total_watts": 3.0},
            provenance={"cpu.f_hertz": WALL, "thermal.hottest_celsius": WALL, "power.total_watts": METER},
            board="orin-nano",
            facts={"mode": "15W"},
        ),
        UpdateAccepted(
            round=1, device="orin", update=update("orin", 1, cost=cost("orin", 1)), bytes_up=4050, at=BEGAN + 12.0
        ),
        closed(
            1, 14.0, failed={"pi-9": 'it said: "no"'}, refused={"weight": 2}, steps=3, missed={"pi-10": 3, "pi-9": 1}
        ),
        CostSettled(round=1, device="orin", cost=cost("orin", 1)),
    ]
    rest = [
        ServerBegan(at=3.0, run_s=60.0, utc_s=1.7e9 + 60, versions={"python": "3.12.1"}),
        Joined(device="orin", at=3.0),
        Left(device="pi-9", at=3.0, cause="unheard"),
        Rewound(round=2, cause="digest"),
        Joined(device="pi-10", at=4.0, cause="restarted", version="0.1.1"),
        opened(2, ("orin", "pi-10"), 5.0 - BEGAN),
        Sensed(device="orin", at=11.0, readings={"cpu.f_hertz": 1.0e9}, provenance={"cpu.f_hertz": WALL}),
        Sensed(device="pi-10", at=11.0, readings={"cpu.f_hertz": 6.0e8}, provenance={"cpu.f_hertz": WALL}),
        UpdateAccepted(round=2, device="orin", update=update("orin", 2, cost=cost("orin", 2)), bytes_up=4050, at=16.0),
        closed(2, 17.0 - BEGAN, accuracy=0.75),
        CostSettled(round=2, device="orin", cost=cost("orin", 2)),
        CostSettled(round=2, device="pi-10", cost=cost("pi-10", 2)),
        UpdateAccepted(
            round=3,
            device="orin",
            update=update("orin", 3, params=None, weight=0.0, num_examples=0, loss=None),
            bytes_up=0,
            at=20.0,
        ),
        Evaluated(accuracy=0.5, by_device={"orin": {"eval_accuracy": 0.5, "eval_examples": 10.0}}),
        Noted(what="the roof was wet"),
        RunClosed(outcome="finished"),
    ]
    return [*first, *rest]


def trained_alone(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    """Return a journal as it were if no step of it had gone through the server."""
    nothing = dict.fromkeys(("exchange_s", "exchange_joules", "features_bytes", "gradient_bytes"))

    def changed(one: AnyRecord) -> AnyRecord:
        match one:
            case RoundOpened():
                told = {device: replace(said, steps=0) for device, said in one.assignments.items()}
                return replace(one, assignments=told)
            case UpdateAccepted():
                return replace(one, update=replace(one.update, cost=replace(one.update.cost, **nothing)))
            case CostSettled():
                return replace(one, cost=replace(one.cost, **nothing))
        return one

    return [changed(one) for one in records]
