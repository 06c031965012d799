"""Keep examples and networks between tasks, and make the mini-batches of a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from device_agent.exchange.state_files import remember_notice
from device_agent.trainer.threads import Threads
from shared.algorithms.base import Batch
from shared.data.examples import Examples, batches, split_holdout
from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError, Superseded
from shared.models.base import Model
from shared.models.build import build_blank, build_zeroed
from shared.models.cost import step_flops
from shared.models.evaluate import count_outputs, require_labels
from shared.protocol.messages import Assignment, Spec
from shared.registry import is_custom
from shared.runtime.memory import require_room
from shared.tensors.placement import CPU

log = logging.getLogger("trainer")

Parts: TypeAlias = tuple[Examples, Examples, Examples]
"""For training, for evaluation, for validation."""


@dataclass
class Workspace:
    """What a trainer keeps between tasks: the device's examples and the network it built last.

    Attributes:
        read: Reads a device's examples.
        noted: Warnings that were given; in a replay, of all of its devices.
        device: Where networks, states and batches are while a task computes; files and examples stay on the CPU.
        threads: Finds how many threads are fastest; None where their number is given.
    """

    read: Callable[[Data], Examples] = load
    device: torch.device = CPU
    threads: Threads | None = None
    examples: dict[bytes, Parts] = field(default_factory=dict)
    models: dict[bytes, Model] = field(default_factory=dict)
    skeletons: dict[bytes, Model] = field(default_factory=dict)
    counted: dict[tuple[bytes, torch.Size, int], int] = field(default_factory=dict)
    outputs: dict[tuple[bytes, torch.Size, torch.dtype], int] = field(default_factory=dict)
    fitting: set[bytes] = field(default_factory=set)
    noted: set[str] = field(default_factory=set)

    def data(self, spec: Data) -> Parts:
        """Return the device's examples for training, for evaluation and for validation, read once.

        Raises:
            ConfigError: They cannot be used, or what they were read from is gone.
        """
        key = msgspec.msgpack.encode(spec)
        if spec.path and not Path(spec.path).exists():
            self.examples.clear()
            raise ConfigError(f"{spec.path}: is not there; put the examples back, or correct data.path")
        if key not in self.examples:
            remaining, evaluation = split_holdout(self.read(spec), spec.holdout, seed=0)
            train, validation = split_holdout(remaining, spec.validation, seed=1)
            self.examples = {key: (train, evaluation, validation)}
        return self.examples[key]

    def warn_once(self, states: Path, what: str) -> None:
        """Warn of something once a device, however often its trainer is started anew.

        Args:
            states: Where the device keeps its states.
            what: A line.
        """
        if what not in self.noted and remember_notice(states, what):
            log.warning("%s", what)
        self.noted.add(what)

    def batches(self, spec: Data, assignment: Assignment, is_superseded: Callable[[], bool]) -> TaskBatches:
        """Return the device's mini-batches of a task.

        Args:
            assignment: The task's: seed, batch size and epochs.
            is_superseded: Whether the task is given up; asked at every batch.
        """
        train, _, validation = self.data(spec)
        validation_batch = validation.inputs.to(self.device), validation.labels.to(self.device)
        return TaskBatches(train, assignment, is_superseded, validation_batch, self.device, self.threads)

    def model(self, spec: Spec) -> Model:
        """Return the network, built once; its parameters are whatever the last task left.

        A pixel's channels lie side by side in memory, as convolutions read them: a step of `cnn` takes 0.8 of the
        time on an AMD EPYC.
        """
        key = msgspec.msgpack.encode(spec)
        if key not in self.models:
            self.models.clear()
            self._require_room(spec)
            model = build_zeroed(spec)
            if not is_custom(spec.name):  # which may take a `view` that needs the usual order
                model.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stubs lack it
            model.layers.to(self.device)
            self.models = {key: model}
        return self.models[key]

    def release(self) -> None:
        """Give up the network that was built last, with what a training cut short has left in it."""
        self.models.clear()

    def skeleton(self, spec: Spec) -> Model:
        """Return the network without storage, made once: a split device half has parameters of its own."""
        key = msgspec.msgpack.encode(spec)
        if key not in self.skeletons:
            self.skeletons = {key: build_blank(spec)}
        return self.skeletons[key]

    def _require_room(self, spec: Spec) -> None:
        """Refuse a network that does not fit in memory with its gradients, before it is built."""
        leaves = self.skeleton(spec).layers.state_dict().values()
        require_room(2 * sum(leaf.numel() * leaf.element_size() for leaf in leaves), Path(f"model {spec.name}"))

    def require_fit(self, spec: Spec, data: Data, *, split: bool = False) -> None:
        """Refuse examples that a network cannot take, or that have more classes than it has outputs; looks once.

        Args:
            split: Whether the device never builds all of it.

        Raises:
            ConfigError: They do not fit; the message says why, and what to change.
        """
        key = msgspec.msgpack.encode((spec, data))
        if key in self.fitting:
            return
        try:
            for examples in filter(len, self.data(data)):
                require_labels(examples.labels, self._count_outputs(spec, examples.inputs, split=split))
        except ConfigError as error:
            raise ConfigError(f"{data.path or data.source}: {error}, or this device's [data]") from error
        self.fitting = {key}

    def _count_outputs(self, spec: Spec, inputs: Tensor, *, split: bool) -> int:
        """Return how many outputs a network has for inputs such as these, counted once; for all devices of a replay."""
        key = (msgspec.msgpack.encode(spec), inputs.shape[1:], inputs.dtype)
        if key not in self.outputs:
            model = self.skeleton(spec) if split else self.model(spec)
            self.outputs = {key: count_outputs(model.layers, {}, inputs)}
        return self.outputs[key]

    def flops(self, spec: Spec, example: torch.Size, batch_size: int) -> int:
        """Return the floating-point operations of one training step, counted once.

        Args:
            example: Shape of one input.
            batch_size: Examples of a step.
        """
        key = (msgspec.msgpack.encode(spec), example, batch_size)
        if key not in self.counted:
            self.counted = {key: step_flops(spec, example, batch_size)}
        return self.counted[key]


@dataclass(frozen=True)
class TaskBatches:
    """Mini-batches of one task, on its device; stops when the task is superseded.

    They are put together on the CPU, one at a time: the memory of a Jetson is its GPU's as well.
    """

    examples: Examples
    assignment: Assignment
    is_superseded: Callable[[], bool]
    validation: Batch = field(default_factory=lambda: (torch.empty(0), torch.empty(0, dtype=torch.int64)))
    device: torch.device = CPU
    threads: Threads | None = None

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        return len(self.examples)

    def inputs_at(self, places: Tensor) -> Tensor:
        """Return inputs by place, not augmented.

        Raises:
            Superseded: A newer task has come.
        """
        self._require_current()
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
            self._require_current()
            start = perf_counter()
            yield inputs.to(self.device), labels.to(self.device)
            if self.threads and not assignment.is_split:  # whose steps wait for the server
                self.threads.note(perf_counter() - start)

    def _require_current(self) -> None:
        if self.is_superseded():
            raise Superseded("a newer task has come")
