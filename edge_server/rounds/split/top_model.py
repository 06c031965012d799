"""Server part of a split network during one round: decode features, compute gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.algorithms.base import Algorithm
from shared.algorithms.split.cut_shapes import measure_feature_rms
from shared.codecs.base import Codec, decode_bounded
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol import payload
from shared.protocol.messages import Assignment, derive_seed
from shared.protocol.topics import SERVER
from shared.registry import FAULTS
from shared.tensors.generators import seed_torch
from shared.tensors.tree import CPU, State, Tree, state_to_device, to_device
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import Sender


@dataclass
class TopModel:
    """The network above the cut; trains step by step on its own copy of the state.

    Attributes:
        model: The whole network, without storage.
        state: After the last served step.
        codec: Of features and gradients.
        seed: The run's seed; with the step's number it seeds the random draws of a step.
        before: Number of steps of the run before this round.
        examples: Inputs of the server's own data; None without any.
        device: Where it computes; payloads are on the CPU.
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
        return state_to_device(self.state, CPU)

    def read(self, device: str, receiver: Receiver[MemorySink]) -> tuple[Tree, float]:
        """Decode and check features; leaves may be views of the received bytes.

        Returns:
            The features, and the root mean square of their floating-point values.

        Raises:
            WireError: They cannot be used.
        """
        assert self.algorithm.split
        try:
            sent = payload.unpack(receiver.finish())
            up = decode_bounded(self.codec, sent).tree
            norm = self.algorithm.split.check_features(self.model, self.state, self.assignments[device], up)
        except FAULTS as error:  # from torch, a codec, or a user's own network
            raise WireError(f"invalid features: {error}", reason="shape") from error
        count = sum(leaf.numel() for leaf in up.values() if leaf.is_floating_point())
        return up, norm / math.sqrt(max(count, 1))

    def usual_size(self) -> float:
        """Return the root mean square of the features that the network computes on the server's examples.

        Without examples or a known cut it is 1, near which first weights and normalization keep features. No device can
        influence it.
        """
        split = self.algorithm.split
        if self.examples is None or split is None or split.cut_of is None:
            return 1.0
        with seed_torch(derive_seed(self.seed, self.before, f"{SERVER}/size")):
            return measure_feature_rms(
                self.model, split.cut_of(self.model), self.state.tree, self.examples.to(self.device)
            )

    def serve(self, step: int, ups: Mapping[str, Tree], frame_bytes: int) -> dict[str, Sender]:
        """Compute one step with the devices that take part, in order of name; return the gradient for each.

        In a session that measures running statistics nothing is trained, and the gradients are empty.

        Args:
            step: Number of the step in the round.
            frame_bytes: The largest frame of a gradient.
        """
        split = self.algorithm.split
        assert split
        measures = any(assignment.measures_statistics for assignment in self.assignments.values())
        take_step = split.measure if measures and split.measure else split.serve
        with seed_torch(derive_seed(self.seed, self.before + step, SERVER)):
            sent = {device: to_device(up, self.device) for device, up in sorted(ups.items())}
            self.state, downs = take_step(self.model, self.state, self.assignments, sent)
        return {
            device: Sender.of_parts(payload.pack(self.codec.encode(to_device(down, CPU), None)[0]), frame_bytes)
            for device, down in downs.items()
        }


def copy_state(state: State, device: torch.device = CPU) -> State:
    """Return a copy of a state on a device, so that steps may change it in place.

    Sorted by key: a state read back from disk must give the same result where an algorithm draws leaf by leaf.
    """
    return replace(state, tree={key: leaf.to(device, copy=True) for key, leaf in sorted(state.tree.items())})
