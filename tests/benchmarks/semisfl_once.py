"""One process of `semisfl`: both halves of a session's step by our code and by a plain PyTorch loop.

`serve TURNS` times the server's step both ways, in turns. `hold WHO STEPS` tells the peak memory of `server`, `keeping`
(the server with the gradients that it keeps of a round), `loop`, `device` (student and teacher) or `student` (its
training alone), beyond what the process has before there is a network.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from device_agent.trainer.workspace import TaskBatches
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.split.gradient_store import GradientStore, SentGradients
from shared.algorithms.base import Algorithm, Cohort
from shared.algorithms.semisupervised.semisfl import semisfl
from shared.codecs.dense import dense
from shared.data.examples import Examples
from shared.data.views.pair import make_views
from shared.models.alexnet import alexnet
from shared.models.base import Model
from shared.models.build import build_blank
from shared.protocol import payload
from shared.protocol.messages import Assignment, Hyper, Spec
from shared.runtime import malloc
from shared.tensors.tree import State, Tree
from shared.transfer.sender import Sender

NET: dict[str, Any] = {"width": 0.5, "hidden": 1024}
CUT, DEVICES, BATCH = 3, 8, int(os.environ.get("BATCH", "32"))
QUEUE, HIDDEN, PROJECTIONS, THRESHOLD, KAPPA = 1024, 512, 128, 0.11, 0.2
HYPER = Hyper(batch_size=BATCH, learning_rate=0.02, momentum=0.9, weight_decay=5e-4)
KIB, WARM = 1024, 1
Step = Callable[[], object]


def begun() -> tuple[Algorithm, Model, State, dict[str, Assignment]]:
    """Return the method, its network, a server's state with one device's batches in the queue's room, and the tasks."""
    torch.manual_seed(0)
    algorithm, model = semisfl(cut=CUT, threshold=THRESHOLD, schedule="constant"), alexnet(**NET)
    cohort = Cohort(tuple(f"d{place}" for place in range(DEVICES)), HYPER, 1, 10)
    state = algorithm.init(model, 1)
    return algorithm, model, state, algorithm.assign(state, cohort, {}, 1)


def sent(model: Model) -> dict[str, Tree]:
    """Return what the devices send: features of a strong and of a weak view."""
    shape = model.below(CUT)(torch.zeros(1, *model.example)).shape[1:]
    return {
        f"d{place}": {"features": torch.rand(BATCH, *shape), "teacher": torch.rand(BATCH, *shape)}
        for place in range(DEVICES)
    }


def our_server(*, keeps: bool = False) -> Step:
    """Return a step of the server's half, which may keep what it answers, for devices that do their steps again."""
    algorithm, model, state, told = begun()
    assert algorithm.split
    ups, serve, link = sent(model), algorithm.split.serve, LinkConfig()
    kept, shelf, codec = (
        {device: SentGradients() for device in ups},
        GradientStore(link.kept_gradients_mb << 20),
        dense(),
    )
    shelf.folder = Path(tempfile.gettempdir())

    def step() -> object:
        nonlocal state
        state, downs = serve(model, state, told, ups)
        for device, down in downs.items() if keeps else ():
            number = kept[device].last + 1
            kept[device].serve(number, b"features")
            gradient = Sender.of_parts(payload.pack(codec.encode(down, None)[0]), link.frame_bytes)
            kept[device].put(number, gradient, shelf)
        return downs

    return step


class Loop:
    """The same computation as anybody would write it in PyTorch: modules, torch's own SGD, tensors for the queue."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        whole = alexnet(**NET)
        self.ups = [(up["features"], up["teacher"]) for up in sent(whole).values()]
        self.top = whole.above(CUT).train()
        self.teacher = copy.deepcopy(self.top).eval()
        width = self.ups[0][0][0].numel()
        self.head = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PROJECTIONS))
        self.teacher_head = copy.deepcopy(self.head)
        self.labelled = torch.zeros(QUEUE, PROJECTIONS), torch.zeros(QUEUE, dtype=torch.int64), torch.zeros(QUEUE) > 0
        self.queue = torch.zeros(QUEUE, PROJECTIONS), torch.zeros(QUEUE, dtype=torch.int64), torch.zeros(QUEUE) > 0
        self.place = 0
        self.optimizer = torch.optim.SGD(
            [*self.top.parameters(), *self.head.parameters()],
            lr=HYPER.learning_rate,
            momentum=HYPER.momentum,
            weight_decay=HYPER.weight_decay,
            nesterov=True,
        )

    def step(self) -> Tensor:
        """Return the gradient of the features."""
        features = torch.cat([student for student, _ in self.ups]).requires_grad_()
        seen = torch.cat([labeller for _, labeller in self.ups])
        with torch.no_grad():
            likeliest, labels = self.teacher(seen).softmax(1).max(1)
            sure = likeliest > THRESHOLD
            own = functional.normalize(self.teacher_head(seen.flatten(1)), dim=1)
        current = own, labels, sure  # and what the queue holds; room that is empty is not compared with
        keys, classes, sures = map(
            torch.cat, zip(current, *map(self._filled, (self.labelled, self.queue)), strict=True)
        )
        loss = (functional.cross_entropy(self.top(features), labels, reduction="none") * sure).mean()
        anchors = functional.normalize(self.head(features.flatten(1)), dim=1)
        logits = anchors @ keys.T / KAPPA
        positive = (labels[:, None] == classes) & sures
        count = positive.sum(1)
        mean = (logits * positive).sum(1) / count.clamp_min(1)
        loss = loss + ((logits.logsumexp(1) - mean) * (count > 0)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        places = (self.place + torch.arange(len(own))) % QUEUE
        for ring, new in zip(self.queue, (own, labels, sure), strict=True):
            ring[places] = new
        self.place += len(own)
        assert features.grad is not None
        return features.grad

    def _filled(self, ring: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        count = min(self.place, QUEUE) if ring is self.queue else 0
        return tuple(part[:count] for part in ring)


def device_step(*, with_teacher: bool) -> Step:
    """Return a step of a device: SemiSFL's, or the training of the student's bottom alone on the same views."""
    model, told = build_blank(Spec(name="alexnet", options=NET)), Assignment(seed=1, hyper=HYPER, steps=50)
    labels = torch.zeros(20 * BATCH, dtype=torch.int64)
    examples = Examples(torch.rand(20 * BATCH, *model.example), labels).without_labels()
    batches, bottom = TaskBatches(examples, told, lambda: False), model.below(CUT)
    start = {name: 0.1 * torch.randn(leaf.shape) for name, leaf in bottom.state_dict().items()}
    if not with_teacher:
        return _student_alone(bottom, start, batches)
    start |= {f"teacher/{name}": leaf.clone() for name, leaf in start.items()}
    session = semisfl(cut=CUT).local(model, State(), start, batches, told)
    down: Tree | None = None

    def step() -> object:
        nonlocal down
        up = session.send(down)
        down = {"gradient": torch.rand(up["features"].shape) / BATCH}
        return up

    return step


def _student_alone(bottom: nn.Sequential, start: Tree, batches: TaskBatches) -> Step:
    bottom.load_state_dict(start, assign=True)
    optimizer = torch.optim.SGD(bottom.train().parameters(), lr=0.02, momentum=0.9, nesterov=True)
    source = iter(batches)

    def step() -> object:
        inputs, _ = next(source)
        features = bottom(make_views(inputs, ("strong",), 1)[0])
        optimizer.zero_grad()
        features.backward(torch.rand(features.shape) / BATCH)
        optimizer.step()
        return features.detach()

    return step


def timed(turns: int) -> dict[str, float]:
    """Return the least seconds of a step both ways, measured in turns."""
    ways: dict[str, Step] = {"server": our_server(), "loop": Loop().step}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + turns):
        for name, step in ways.items():
            began = time.thread_time()
            step()
            if turn >= WARM:
                taken[name].append(time.thread_time() - began)
    return {name: min(seconds) for name, seconds in taken.items()}


def held(who: str, steps: int) -> float:
    """Return the peak bytes of some steps beyond what there was before."""
    weight = torch.zeros(1, requires_grad=True)  # what torch's SGD imports at its first step counts for nobody
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    make: dict[str, Callable[[], Step]] = {
        "server": our_server,
        "keeping": lambda: our_server(keeps=True),
        "loop": lambda: Loop().step,
        "device": lambda: device_step(with_teacher=True),
        "student": lambda: device_step(with_teacher=False),
    }
    step = make[who]()
    for _ in range(steps):
        step()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM"))
    return peak - before


def main() -> None:
    """Do what the command line names."""
    malloc.tune()
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    found = timed(int(rest[0])) if what == "serve" else held(rest[0], int(rest[1]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
