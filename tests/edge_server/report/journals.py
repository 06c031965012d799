"""Journals of runs that nobody made, of any size, in which everything happens that a report must show.

Reads a page as a browser would, with the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    UpdateAccepted,
)
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from shared.data.spec import Data
from shared.protocol.measurements import Cost, Provenance
from shared.protocol.messages import Assignment, Hyper, Update, Value

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


def rows(table: Element) -> dict[str, list[str]]:
    """A table's rows by the text of their first cell."""
    cells = [[cell.words() for cell in row.children] for row in table.all("tr")]
    return {first: rest for first, *rest in cells}
