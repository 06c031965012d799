"""Generated journals of any size, for tests of reports.

Reads a page as a browser would, with the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
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
from edge_server.plan.sections import Chosen
from edge_server.rounds.check_plan import load
from shared.data.spec import Data
from shared.protocol.measurements import Cost, Provenance, StepCost
from shared.protocol.messages import Assignment, Hyper, Transfer, Update, Value
from tests.edge_server.harness import write_plan

MODELLED = Provenance(source="cpu time", quality="modelled")
CORRECTED = Provenance(source="pmic", quality="corrected")


def plan(rounds: int, name: str = "trial") -> Plan:
    return Plan(
        name=name,
        rounds=rounds,
        algorithm=Chosen(name="fedavg"),
        model=Chosen(name="mlp", options={"inputs": 4}),
        data=Data(source="digits"),
    )


def cost(seconds: float = 2.0, watts: float | None = 4.0, provenance: Provenance | None = None) -> Cost:
    """Of a task that downloads for a tenth of its computing and uploads for a quarter of it."""
    shares = {"download": seconds / 10, "compute": seconds, "upload": seconds / 4}
    joules = {f"{part}_joules": watts * size for part, size in shares.items()} if watts else {}
    return Cost(
        **{f"{part}_s": size for part, size in shares.items()},
        **joules,
        idle_w=2.0 if watts else None,
        bytes_down=1000,
        provenance=dict.fromkeys(joules, provenance) if provenance else {},
    )


def update(device: str, number: int, said: Cost, loss: float = 0.5) -> UpdateAccepted:
    sent = Update(run="run", round=number, device=device, params=None, num_examples=10, loss=loss, cost=said)
    return UpdateAccepted(round=number, device=device, update=sent, bytes_up=1000)


def closed(number: int, arrived: list[str], **more) -> RoundClosed:
    sizes = dict.fromkeys(arrived, 1000)
    figures = {"seconds": 4.0, "accuracy": 0.5, "test_loss": 1.0, "loss": 0.5, "bytes_up": sizes, "bytes_down": sizes}
    return RoundClosed(round=number, outcome="aggregated", arrived=tuple(arrived), **{**figures, **more})


def opened(number: int, devices: list[str], **values: Value) -> RoundOpened:
    told = Assignment(seed=1, hyper=Hyper(), values=values)
    return RoundOpened(round=number, assignments=dict.fromkeys(devices, told))


def begin(rounds: int, *, live: bool = False, run: str = "run") -> RunOpened:
    return RunOpened(run=run, plan=plan(rounds), started="20260101T000000Z" if live else "")


def small(**more) -> list[AnyRecord]:
    """Two rounds of two devices, in the first of which one of them is late, and known in full."""
    return [
        begin(2, **more),
        opened(1, ["a", "b"], keep=0.5),
        update("a", 1, cost(2.0)),
        CostSettled(round=1, device="b", cost=cost(6.0)),
        closed(1, ["a"], accuracy=0.4),
        opened(2, ["a", "b"], keep=0.25),
        update("a", 2, cost(2.0)),
        update("b", 2, cost(3.0)),
        closed(2, ["a", "b"], accuracy=0.8),
        Evaluated(accuracy=0.7, by_device={"a": {"eval_accuracy": 0.75}}),
        RunClosed(outcome="finished"),
    ]


def many(fleet: int, rounds: int, each: int, *, shift: int = 0) -> list[AnyRecord]:
    """A run in which every tenth task is late, every fifteenth fails, and every seventh device has no sensor."""
    records: list[AnyRecord] = [begin(rounds, run=f"many-{shift}")]
    for number in range(1, rounds + 1):
        start = (number * 37) % fleet
        names = sorted({f"device-{(start + place) % fleet:05d}" for place in range(each)})
        index = {name: int(name[7:]) for name in names}
        late = {name for name in names if (index[name] + number) % 10 == 0}
        failed = {name: f"out of memory at step {number % 3}" for name in names if (index[name] * number) % 15 == 1}
        arrived = [name for name in names if name not in late | failed.keys()]
        told = {
            name: Assignment(
                seed=1, hyper=Hyper(), values={"keep": 0.25 + (index[name] % 8) / 16 + number / rounds / 4, "bits": 8}
            )
            for name in names
        }
        records.append(RoundOpened(round=number, assignments=told))
        for name in arrived:
            watts = None if index[name] % 7 == 0 else 3.0 + index[name] % 5
            marked = (None, MODELLED, CORRECTED)[index[name] % 3]
            records.append(update(name, number, cost(1.0 + (index[name] * 13 + number) % 11 / 4, watts, marked)))
        accuracy = 0.95 - 0.8 * 0.96 ** (number + shift)
        records.append(
            closed(
                number,
                arrived,
                failed=failed,
                accuracy=accuracy,
                test_loss=3.0 * (1 - accuracy),
                loss=2.5 * (1 - accuracy),
            )
        )
    return [*records, RunClosed(outcome="finished")]


VOID = {"meta"}


@dataclass
class Element:
    name: str
    attributes: Mapping[str, str | None]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self, name: str = "", class_: str = "") -> list[Element]:
        """All elements below this one of a name and with a class, in order."""
        found = []
        for child in self.children:
            classes = (child.attributes.get("class") or "").split()
            if name in ("", child.name) and (not class_ or class_ in classes):
                found.append(child)
            found += child.all(name, class_)
        return found

    def words(self) -> str:
        """Its text and that of all below it, with a space between two."""
        return " ".join([self.text.strip(), *(child.words() for child in self.children)]).strip()


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {attrs}"
        child = Element(tag, dict(attrs))
        self.open[-1].children.append(child)
        if tag not in VOID:
            self.open.append(child)

    def handle_endtag(self, tag):
        assert self.open[-1].name == tag, f"</{tag}> ends <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].text += data


def parsed(page: str) -> Element:
    """The whole page; fails where an element is not closed, or another one is."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].name}> is not closed"
    return reader.open[0]


def section(root: Element, name: str) -> Element:
    """A section of a page, by its id."""
    [found] = [one for one in root.all("section") if one.attributes.get("id") == name]
    return found


def rows(table: Element) -> dict[str, list[str]]:
    """A table's rows by the text of their first cell."""
    cells = [[cell.words() for cell in row.children] for row in table.all("tr")]
    return {first: rest for first, *rest in cells}


BEGAN = 1000.0
HYPER = Hyper(local_epochs=2, batch_size=16, learning_rate=0.1, momentum=0.5)
METER = Provenance(source="ina3221", quality="measured", uncertainty=0.02)
WALL = Provenance(source="monotonic clock", quality="measured")
MODEL = Provenance(source="power model", quality="modelled")


def field_plan(folder: Path) -> Plan:
    """Return the plan of the journal, with two of its devices named."""
    more = '[[device]]\nname = "pi-9"\n[[device]]\nname = "orin"'
    return load(write_plan(folder, rounds=2, more=more), folder)


def field_cost(device: str, round_: int) -> Cost:
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


def field_update(device: str, round_: int, **changes: object) -> Update:
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


def field_opened(round_: int, devices: tuple[str, ...], at: float) -> RoundOpened:
    """Return a round's beginning."""
    told = {
        name: Assignment(seed=7 + place, hyper=HYPER, steps=3 if round_ == 2 else 0, values={"rho": 0.5, "on": [1, 2]})
        for place, name in enumerate(devices)
    }
    return RoundOpened(round=round_, assignments=told, at=BEGAN + at, online=len(devices))


def field_closed(round_: int, at: float, **changes: object) -> RoundClosed:
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
        RunOpened(run="field-1", plan=field_plan(folder), started="20260101T000000Z"),
        ServerBegan(at=BEGAN, run_s=0.0, utc_s=1.7e9, versions={"python": "3.12.1", "torch": "2.4.0"}),
        Joined(device="orin", at=BEGAN, version="0.1.0"),
        Joined(device="pi-10", at=BEGAN + 1.5, version="0.1.0"),
        UpdateAccepted(
            round=0,
            device="orin",
            update=field_update("orin", 0, params=None, weight=0.0, num_examples=0, loss=None),
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
        field_opened(1, ("orin", "pi-10", "pi-9"), 5.0),
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
            round=1,
            device="orin",
            update=field_update("orin", 1, cost=field_cost("orin", 1)),
            bytes_up=4050,
            at=BEGAN + 12.0,
        ),
        field_closed(
            1, 14.0, failed={"pi-9": 'it said: "no"'}, refused={"weight": 2}, steps=3, missed={"pi-10": 3, "pi-9": 1}
        ),
        CostSettled(round=1, device="orin", cost=field_cost("orin", 1)),
    ]
    rest = [
        ServerBegan(at=3.0, run_s=60.0, utc_s=1.7e9 + 60, versions={"python": "3.12.1"}),
        Joined(device="orin", at=3.0),
        Left(device="pi-9", at=3.0, cause="unheard"),
        Rewound(round=2, cause="digest"),
        Joined(device="pi-10", at=4.0, cause="restarted", version="0.1.1"),
        field_opened(2, ("orin", "pi-10"), 5.0 - BEGAN),
        Sensed(device="orin", at=11.0, readings={"cpu.f_hertz": 1.0e9}, provenance={"cpu.f_hertz": WALL}),
        Sensed(device="pi-10", at=11.0, readings={"cpu.f_hertz": 6.0e8}, provenance={"cpu.f_hertz": WALL}),
        UpdateAccepted(
            round=2, device="orin", update=field_update("orin", 2, cost=field_cost("orin", 2)), bytes_up=4050, at=16.0
        ),
        field_closed(2, 17.0 - BEGAN, accuracy=0.75),
        CostSettled(round=2, device="orin", cost=field_cost("orin", 2)),
        CostSettled(round=2, device="pi-10", cost=field_cost("pi-10", 2)),
        UpdateAccepted(
            round=3,
            device="orin",
            update=field_update("orin", 3, params=None, weight=0.0, num_examples=0, loss=None),
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
