"""Split network: lower half on the device, upper half on the server.

If the server is unavailable, the whole network answers, provided that it is loaded too; otherwise the caller gets the
cause.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from device_agent.inference.collaborative.interface import AskTop, Half, TopReply
from device_agent.inference.session import OpenModel
from device_agent.inference.settings import CutSettings
from shared.errors import InferenceRefused, Unreachable, WireError, first_line
from shared.protocol import payload
from shared.protocol.inference.release import TensorSpec
from shared.protocol.messages import Spec
from shared.tensors import feature_codec

Array: TypeAlias = NDArray[Any]
Compute: TypeAlias = Callable[[Array], Awaitable[Array]]
"""Runs a network, or a part of one, on a batch of shape (B, ...)."""

QUICK_S = 0.002
"""Longer computations run in a thread."""
MAX_SAMPLES = 1024
"""Latest requests whose figures are stored."""
MOST_OUTPUT_VALUES = 1 << 16


@dataclass(frozen=True)
class RequestParts:
    """Time and traffic of a request.

    Attributes:
        device_s: On the device: lower half, encoding and decoding, or the whole network.
        link_s: Transfer and queueing between device and server; 0 without the server.
        server_s: On the server: waiting for a batch and the upper half.
        bytes_up: Messages and frames sent.
    """

    device_s: float
    link_s: float = 0.0
    server_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class CutAnswer:
    """Outputs of a split network.

    Attributes:
        outputs: Shape (B, ...), in the network's output dtype.
        by: `server` if the upper half ran there, `device` if the whole network ran locally.
        parts: Time and traffic of the request.
    """

    outputs: Array
    by: Literal["server", "device"]
    parts: RequestParts


@dataclass
class CutFigures:
    """Statistics since the model was loaded.

    Attributes:
        answered: Requests by place of computation, `server` or `device`.
        refused: Requests that the server did not answer, by reason; `unreachable` without any reply.
        recent: The latest requests that the server answered.
    """

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    recent: deque[RequestParts] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    bytes_up: int = 0
    bytes_down: int = 0

    def count(self, answer: CutAnswer) -> None:
        self.answered[answer.by] += 1
        if answer.by == "server":
            self.recent.append(answer.parts)
            self.bytes_up += answer.parts.bytes_up
            self.bytes_down += answer.parts.bytes_down


@dataclass
class CutModel:
    """A version of a split network.

    Attributes:
        half: Identity of the upper half on the server.
        lower: Runs the lower half.
        features: Output tensor of the lower half.
        output: Output tensor of the upper half.
        deadline_s: Seconds that a request waits for the server.
        run_full: Runs the whole network locally; None if it is not loaded.
        figures: Statistics of the requests.
    """

    half: Half
    lower: Compute
    features: TensorSpec
    output: TensorSpec
    codec: Spec
    deadline_s: float
    ask: AskTop
    run_full: Compute | None = None
    figures: CutFigures = field(default_factory=CutFigures)

    async def __call__(self, inputs: Array) -> CutAnswer:
        """Return the outputs of a batch.

        Args:
            inputs: Shape (B, ...), with the input's dtype.

        Raises:
            Unreachable: The server did not reply in time and the whole network is not loaded.
            InferenceRefused: The server refused and the whole network is not loaded.
        """
        try:
            answer = await self._by_server(inputs)
        except (Unreachable, InferenceRefused) as error:
            self.figures.refused[getattr(error, "reason", "unreachable")] += 1
            if self.run_full is None:
                raise
            began = time.perf_counter()
            outputs = await self.run_full(inputs)
            answer = CutAnswer(outputs, "device", RequestParts(time.perf_counter() - began))
        self.figures.count(answer)
        return answer

    async def _by_server(self, inputs: Array) -> CutAnswer:
        started = time.perf_counter()
        features = await self.lower(inputs)
        if not np.isfinite(features).all():
            raise InferenceRefused("the lower half's outputs contain NaN or infinite numbers", reason="not-finite")
        parts = payload.pack(feature_codec.encode_features(self.features.name, features, self.codec))
        sent = time.perf_counter()
        reply = await self.ask(self.half, parts, self.deadline_s)
        answered = time.perf_counter()
        outputs = self._read(reply, len(inputs))
        server_s = reply.timing.waited_s + reply.timing.compute_s
        device_s = sent - started + time.perf_counter() - answered
        link_s = max(0.0, answered - sent - server_s)
        return CutAnswer(outputs, "server", RequestParts(device_s, link_s, server_s, reply.bytes_up, reply.bytes_down))

    def _read(self, reply: TopReply, count: int) -> Array:
        try:
            outputs = feature_codec.decode_features(
                payload.unpack(memoryview(reply.outputs)), self.output, MOST_OUTPUT_VALUES
            )
        except WireError as error:
            raise InferenceRefused(f"the server's outputs: {error}", reason=error.reason) from error
        if len(outputs) != count:
            raise InferenceRefused(f"the server returned {len(outputs)} outputs for {count} inputs", reason="shape")
        return outputs


def build_cut_model(
    lower: OpenModel, full_model: OpenModel | None, config: CutSettings, ask: AskTop, executor: Executor
) -> CutModel:
    """Build a split network from its opened lower half.

    Args:
        full_model: The whole network as a fallback; None for none.
    """
    manifest = lower.manifest
    assert manifest.halves
    options: dict[str, bool | int | float | str] = {"bits": config.bits} if config.codec == "quantize" else {}
    return CutModel(
        half=Half(manifest.name, manifest.version, bytes.fromhex(manifest.parameters.sha256)),
        lower=_make_compute(lower, executor),
        features=lower.output,
        output=manifest.halves.top.output,
        codec=Spec(name=config.codec, options=options),
        deadline_s=config.deadline_s,
        ask=ask,
        run_full=_make_compute(full_model, executor) if full_model else None,
    )


def _make_compute(model: OpenModel, executor: Executor) -> Compute:
    def run(inputs: Array) -> Array:
        try:
            return model.run(inputs)
        except Exception as error:  # errors of ONNX Runtime's C++ code have no common class
            raise InferenceRefused(f"the model failed: {first_line(error)}", reason="failed") from error

    async def compute(inputs: Array) -> Array:
        if model.quick_s * len(inputs) <= QUICK_S:
            return run(inputs)
        return await asyncio.get_running_loop().run_in_executor(executor, run, inputs)

    return compute
