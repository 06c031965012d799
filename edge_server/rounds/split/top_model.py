"""Train the server's part of a split network while one round lasts: read what comes up, compute what goes down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.algorithms.base import Algorithm
from shared.algorithms.split.cut_shapes import feature_size
from shared.codecs.base import Codec, decode_bounded
from shared.errors import WireError
from shared.models.base import Model
from shared.models.build import seeded
from shared.protocol import payload
from shared.protocol.messages import Assignment, mix
from shared.protocol.topics import SERVER
from shared.registry import FAULTS
from shared.tensors.placement import CPU, state_on, to_device
from shared.tensors.tree import State, Tree
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import Sender


@dataclass
class TopModel:
    """The network above the cut; learns step by step, on a state of its own.

    Attributes:
        algorithm: A split one.
        model: The whole network, without storage.
        state: After the last step that was served.
        codec: Of what goes up and comes down.
        assignments: What the devices were told.
        seed: Of the run; with a step's number it is that of what is random in the step.
        before: Steps of the run before this round.
        examples: Some inputs of the server's own; None where it has none.
        device: What it computes with; what travels is on the CPU.
    """

    algorithm: Algorithm
    model: Model
    state: State
    codec: Codec
    assignments: Mapping[str, Assignment]
    seed: int
    before: int
    examples: Tensor | None = None
    device: torch.device = CPU

    @property
    def result(self) -> State:
        """The state after the last step, on the CPU."""
        return state_on(self.state, CPU)

    def read(self, device: str, whole: Receiver[MemorySink]) -> tuple[Tree, float]:
        """Decode what came up and see that it can be used; leaves may be views of the bytes.

        Returns:
            It, and the root mean square of its floating-point values.

        Raises:
            WireError: It cannot.
        """
        assert self.algorithm.split
        try:
            sent = payload.unpack(whole.finish())
            up = decode_bounded(self.codec, sent).tree
            norm = self.algorithm.split.check_features(self.model, self.state, self.assignments[device], up)
        except FAULTS as error:  # of torch, a codec, or a network of the user's own
            raise WireError(f"features that make no sense: {error}", reason="shape") from error
        count = sum(leaf.numel() for leaf in up.values() if leaf.is_floating_point())
        return up, norm / math.sqrt(max(count, 1))

    def usual_size(self) -> float:
        """Return the root mean square of the features that the network makes of the server's own examples.

        Where it has none, or the method does not say where it cuts, 1: what a network's first weights and its
        normalization keep it near. No device has a say in it.
        """
        split = self.algorithm.split
        if self.examples is None or split is None or split.cut_of is None:
            return 1.0
        with seeded(mix(self.seed, self.before, f"{SERVER}/size")):
            return feature_size(self.model, split.cut_of(self.model), self.state.tree, self.examples.to(self.device))

    def serve(self, step: int, ups: Mapping[str, Tree], frame_bytes: int) -> dict[str, Sender]:
        """Do one step with the devices that take part, in order of name; return the gradient for each.

        In a session that measures running statistics nothing is trained, and the answers are empty.

        Args:
            step: Number of the step in the round.
            ups: What came up, by device.
            frame_bytes: The largest frame of what goes down.
        """
        split = self.algorithm.split
        assert split
        measures = any(told.measures_statistics for told in self.assignments.values())
        take_step = split.measure if measures and split.measure else split.serve
        with seeded(mix(self.seed, self.before + step, SERVER)):
            sent = {device: to_device(up, self.device) for device, up in sorted(ups.items())}
            self.state, downs = take_step(self.model, self.state, self.assignments, sent)
        return {
            device: Sender.of_parts(payload.pack(self.codec.encode(to_device(down, CPU), None)[0]), frame_bytes)
            for device, down in downs.items()
        }


def copy_state(state: State, device: torch.device = CPU) -> State:
    """Return a state on a device, whose tensors nobody else has, so that steps may change them in place.

    In order of name: one that was read back from disk must come to the same, also where a method draws leaf by leaf.
    """
    return replace(state, tree={key: leaf.to(device, copy=True) for key, leaf in sorted(state.tree.items())})
