"""Plans of these tests: three methods on handwritten digits, small, with rounds long enough to be cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """A method as a plan has it, and the fleet that it trains.

    Attributes:
        sections: Of the plan, by name.
        data: As the plan has it.
        partition: Likewise; its parts and its index are each device's own.
        split: Whether the server trains a part of the model with the devices, step by step.
    """

    name: str
    sections: dict[str, str]
    devices: tuple[str, ...] = ("a", "b")
    data: dict[str, Any] = field(default_factory=lambda: {"source": "digits", "limit": 120, "holdout": 0.2})
    partition: dict[str, Any] = field(default_factory=lambda: {"kind": "even", "seed": 0})
    split: bool = False

    def plan(self, rounds: int) -> str:
        """Return the plan's text."""
        cohort = {"cohort": f"min_devices = {len(self.devices)}", "round": "deadline_s = 120.0\nstep_deadline_s = 60.0"}
        tables = {"data": self.data, "partition": self.partition}
        written = {
            name: "\n".join(f"{key} = {_toml(one)}" for key, one in keys.items()) for name, keys in tables.items()
        }
        sections = {**cohort, **written, **self.sections}
        lines = [f'name = "{self.name}"', f"rounds = {rounds}", "seed = 1"]
        lines += [f"[{name}]\n{text}" for name, text in sections.items()]
        return "\n".join([*lines, *(f'[[device]]\nname = "{name}"' for name in self.devices)]) + "\n"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


MLP = 'name = "mlp"\noptions = { features = 64, hidden = 8, classes = 10 }'
PERSONAL = {"source": "digits", "limit": 120, "holdout": 0.2, "validation": 0.1}

FEDAVG = Method(
    "fedavg",
    {
        "algorithm": 'name = "fedavg"',
        "model": 'name = "cnn"\noptions = { side = 8, width = 16, hidden = 64 }',
        "hyper": "local_epochs = 9\nbatch_size = 16\nlearning_rate = 0.05\nmomentum = 0.9",
        "evaluation": "every = 1\non_device = true",
    },
    devices=("nano-0", "nano-1", "pi-0", "pi-1"),
    data={"source": "digits", "holdout": 0.1},
    partition={"kind": "dirichlet", "alpha": 0.5, "seed": 1},
)
"""The demo's network, data and fleet, trained three times as long a round."""

FEDSPU = Method(
    "fedspu",
    {
        "algorithm": 'name = "fedspu"\noptions = { early_stopping = true }',
        "optimizer": 'name = "clusters"\noptions = { keep = "0.5,1" }',
        "model": MLP,
        "hyper": "local_epochs = 60\nbatch_size = 8\nlearning_rate = 0.01",
        "evaluation": "every = 1",
    },
    data=PERSONAL,
)

FEDSL = Method(
    "fedsl",
    {
        "algorithm": 'name = "fedsl"\noptions = { period = 25, sparsity = 0.3, bits = 8, drop = 0.3 }',
        "model": MLP,
        "hyper": "batch_size = 16\nlearning_rate = 0.1",
        "evaluation": "every = 1",
    },
    split=True,
)

METHODS = {method.name: method for method in (FEDAVG, FEDSPU, FEDSL)}
