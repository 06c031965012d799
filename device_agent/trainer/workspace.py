"""Cache of examples and networks across tasks, and mini-batches of a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from device_agent.exchange.state_files import remember_notice
from device_agent.trainer.threads import ThreadTuner
from shared.algorithms.base import Batch
from shared.data.examples import Examples, batches, split_holdout
from shared.data.fingerprint import fingerprint
from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError, Superseded
from shared.models import MODELS
from shared.models.adaptation import adapt
from shared.models.base import Model
from shared.models.build import build_blank, build_zeroed
from shared.models.cost import step_flops
from shared.models.evaluate import output_shape
from shared.models.leaves import read_constants, read_leaves, reset_constants
from shared.objectives.classification import CLASSIFICATION
from shared.objectives.fit import require_fit
from shared.objectives.training import TrainingObjective
from shared.protocol.adaptation import NetworkAdaptation
from shared.protocol.messages import Assignment, Spec
from shared.runtime.memory import require_room
from shared.tensors.tree import CPU, Tree

log = logging.getLogger("trainer")

T = TypeVar("T")
Parts: TypeAlias = tuple[Examples, Examples, Examples]
"""Examples for training, evaluation and validation."""

NO_EXAMPLES = Examples(torch.empty(0), torch.empty(0, dtype=torch.int64))
"""Stands for the examples that a user's program reads itself."""
SUPERSEDED = "a newer task has arrived"


@dataclass
class Workspace:
    """Cache across tasks: the device's examples and the last network.

    Attributes:
        noted: Warnings already given; in a replay, of all its devices.
        device: Device of networks, states and batches during a task; files and examples stay on the CPU.
        threads: Chooses the number of torch threads; None if it is configured.
        latest: The last object of each kind, such as `network`, with its key.
    """

    read: Callable[[Data], Examples] = load
    device: torch.device = CPU
    threads: ThreadTuner | None = None
    noted: set[str] = field(default_factory=set)
    latest: dict[str, tuple[object, Any]] = field(default_factory=dict)

    def _build_once(self, kind: str, key: object, build: Callable[[], T]) -> T:
        """Return the last object of a kind if it has this key, else build it; it replaces the last one."""
        if kind not in self.latest or self.latest[kind][0] != key:
            self.latest.pop(kind, None)  # it may be large
            self.latest[kind] = key, build()
        value: T = self.latest[kind][1]
        return value

    def data(self, spec: Data) -> Parts:
        """Return the device's examples for training, evaluation and validation; cached until growing files change.

        Raises:
            ConfigError: The examples cannot be used, or their path no longer exists.
        """
        if spec.path and not Path(spec.path).exists():
            for kind in ("examples", "fitting"):
                self.latest.pop(kind, None)
            raise ConfigError(f"{spec.path} does not exist; restore the examples or correct data.path")
        return self._build_once("examples", _key_of(spec), lambda: self._read_parts(spec))

    def _read_parts(self, spec: Data) -> Parts:
        remaining, evaluation = split_holdout(self.read(spec), spec.holdout, seed=0)
        train, validation = split_holdout(remaining, spec.validation, seed=1)
        return train, evaluation, validation

    def warn_once(self, states: Path, what: str) -> None:
        """Log a warning once per device, even across restarts of its trainer.

        Args:
            states: Folder of the device's states, where warnings are remembered.
            what: Text of the warning, one line.
        """
        if what not in self.noted and remember_notice(states, what):
            log.warning("%s", what)
        self.noted.add(what)

    def batches(
        self,
        spec: Data,
        assignment: Assignment,
        is_superseded: Callable[[], bool],
        objective: TrainingObjective = CLASSIFICATION,
    ) -> TaskBatches:
        """Return the device's mini-batches of a task.

        Args:
            assignment: Seed, batch size and epochs of the task.
            is_superseded: Called at every batch; True cancels the task.
        """
        train, _, validation = self.data(spec)
        if objective.reconstructs:
            train, validation = train.as_reconstruction(), validation.as_reconstruction()
        validation_batch = validation.inputs.to(self.device), validation.labels.to(self.device)
        return TaskBatches(train, assignment, is_superseded, validation_batch, self.device, self.threads)

    def model(self, spec: Spec, adaptation: NetworkAdaptation | None = None) -> Model:
        """Return the cached network, with arbitrary parameters, and with its adapters and frozen leaves.

        The memory format is channels-last, as convolutions read it: a step of `cnn` takes 0.8 of the time on an AMD
        EPYC.
        """
        key = msgspec.msgpack.encode((spec, adaptation))
        model, constants = self._build_once("network", key, lambda: self._build_network(spec, adaptation))
        if constants:
            reset_constants(model.layers, constants)
        return model

    def _build_network(self, spec: Spec, adaptation: NetworkAdaptation | None) -> tuple[Model, Tree]:
        """Build a network; return it with its buffers outside the state dict, which every task begins with."""
        self._require_room(spec)
        model = build_zeroed(spec)
        model = adapt(model, adaptation) if adaptation else model
        if spec.name in MODELS:  # a custom network may call `view`, which needs the default format
            model.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stubs lack it
        model.layers.to(self.device)
        return model, read_constants(model.layers)

    def release(self) -> None:
        """Drop the cached network, for example after an interrupted training."""
        self.latest.pop("network", None)

    def skeleton(self, spec: Spec, adaptation: NetworkAdaptation | None = None) -> Model:
        """Return the cached network without storage, for split training, which allocates its own."""
        return self._skeleton(spec, adaptation)[0]

    def outline(self, spec: Spec, adaptation: NetworkAdaptation | None = None) -> Tree:
        """Return the cached leaves of a network, without storage."""
        return self._skeleton(spec, adaptation)[1]

    def _skeleton(self, spec: Spec, adaptation: NetworkAdaptation | None) -> tuple[Model, Tree]:
        def build_outline() -> tuple[Model, Tree]:
            model = build_blank(spec)
            model = adapt(model, adaptation) if adaptation else model
            return model, read_leaves(model.layers)

        return self._build_once("skeleton", msgspec.msgpack.encode((spec, adaptation)), build_outline)

    def _require_room(self, spec: Spec) -> None:
        """Refuse a network that, with its gradients, does not fit in memory."""
        leaves = self.outline(spec).values()
        require_room(2 * sum(leaf.numel() * leaf.element_size() for leaf in leaves), Path(f"model {spec.name}"))

    def require_fit(
        self,
        spec: Spec,
        data: Data,
        *,
        split: bool = False,
        objective: TrainingObjective = CLASSIFICATION,
        adaptation: NetworkAdaptation | None = None,
    ) -> None:
        """Refuse examples that the network cannot process, or whose targets do not fit its outputs; cached.

        Args:
            split: True if the device never allocates the whole network.

        Raises:
            ConfigError: The examples do not fit; the message names the remedy.
        """

        def check() -> bool:
            parts = self.data(data)
            try:
                for examples in filter(len, parts):
                    shape = self._output_shape(spec, examples.inputs, adaptation, split=split)
                    require_fit(objective, shape, examples.inputs, examples.labels, "model")
            except ConfigError as error:
                raise ConfigError(f"{data.path or data.source}: {error}, or this device's [data]") from error
            return True

        self._build_once("fitting", (msgspec.msgpack.encode(spec), _key_of(data)), check)

    def _output_shape(
        self, spec: Spec, inputs: Tensor, adaptation: NetworkAdaptation | None, *, split: bool
    ) -> torch.Size:
        """Return the shape of a network's output for one input of this shape, cached (in a replay for all devices)."""

        def compute() -> torch.Size:
            model = self.skeleton(spec) if split else self.model(spec, adaptation)
            return output_shape(model.layers, {}, inputs)

        return self._build_once("output", (msgspec.msgpack.encode(spec), inputs.shape[1:], inputs.dtype), compute)

    def flops(
        self, spec: Spec, example: torch.Size, batch_size: int, adaptation: NetworkAdaptation | None = None
    ) -> int:
        """Return the floating-point operations of one training step, cached; `example` is the shape of one input."""
        key = msgspec.msgpack.encode((spec, tuple(example), batch_size, adaptation))
        return self._build_once("flops", key, lambda: step_flops(spec, example, batch_size, adaptation=adaptation))


def _key_of(spec: Data) -> tuple[bytes, object]:
    """Return a key of a device's examples, which growing files change."""
    return msgspec.msgpack.encode(spec), fingerprint(spec) if spec.growing else None


@dataclass
class TaskBatches:
    """Mini-batches of one task on its device; iteration stops when the task is superseded.

    Batches are assembled on the CPU, one at a time, since a Jetson's CPU and GPU share their memory.

    Attributes:
        num_examples: Number of examples in one epoch.
    """

    examples: Examples
    assignment: Assignment
    is_superseded: Callable[[], bool]
    validation: Batch = field(default_factory=lambda: (torch.empty(0), torch.empty(0, dtype=torch.int64)))
    device: torch.device = CPU
    threads: ThreadTuner | None = None
    num_examples: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the examples."""
        self.num_examples = len(self.examples.labels)

    def inputs_at(self, places: Tensor) -> Tensor:
        """Return inputs by index, without augmentation.

        Raises:
            Superseded: A newer task has arrived.
        """
        if self.is_superseded():
            raise Superseded(SUPERSEDED)
        return self.examples.inputs.index_select(0, places.cpu()).to(self.device)

    def __iter__(self) -> Iterator[Batch]:
        assignment, hyper = self.assignment, self.assignment.hyper
        for inputs, labels in batches(
            self.examples,
            batch_size=hyper.batch_size,
            epochs=hyper.local_epochs,
            seed=assignment.seed,
            merges_single=assignment.merges_single,
        ):
            if self.is_superseded():
                raise Superseded(SUPERSEDED)
            start = perf_counter()
            yield inputs.to(self.device), labels.to(self.device)
            if self.threads and not assignment.is_split:  # split steps wait for the server
                self.threads.note(perf_counter() - start)
