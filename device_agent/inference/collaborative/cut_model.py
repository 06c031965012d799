"""A network of which the lower half runs here and the upper half on the server; asked like any other.

Where the server's half cannot be had, the whole network answers if it is loaded here too; else the caller is told why.
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
from shared.errors import InferenceRefused, Unreachable, WireError
from shared.protocol import payload
from shared.protocol.inference.release import TensorSpec
from shared.protocol.messages import Spec
from shared.tensors import feature_codec

Array: TypeAlias = NDArray[Any]
Compute: TypeAlias = Callable[[Array], Awaitable[Array]]
"""Runs a network, or a part of one, on a batch of shape (B, ...)."""

QUICK_S = 0.002
"""What takes longer is computed on a thread."""
KEPT = 1024
"""Requests of which the figures are kept."""
MOST_OUTPUT_VALUES = 1 << 16


@dataclass(frozen=True)
class RequestParts:
    """What one request came to, part by part.

    Attributes:
        device_s: Here: the lower half, encoding and decoding; or the whole network.
        link_s: Between here and there, waiting in turn included; 0 where the server had no part.
        server_s: There: waiting for others, and the upper half.
        bytes_up: Of messages and frames.
    """

    device_s: float
    link_s: float = 0.0
    server_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class CutAnswer:
    """Outputs, and who computed them.

    Attributes:
        outputs: Of shape (B, ...).
        by: `server` where its half ran, `device` where the whole network did here.
        parts: Where the time and the bytes went.
    """

    outputs: Array
    by: Literal["server", "device"]
    parts: RequestParts


@dataclass
class CutFigures:
    """Since the model was loaded.

    Attributes:
        answered: Requests, by who answered.
        refused: Requests that the server's half did not answer, by reason; `unreachable` where nothing was heard.
        recent: The last ones that the server's half answered.
    """

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    recent: deque[RequestParts] = field(default_factory=lambda: deque(maxlen=KEPT))
    bytes_up: int = 0
    bytes_down: int = 0

    def count(self, answer: CutAnswer) -> None:
        """Count an answer."""
        self.answered[answer.by] += 1
        if answer.by == "server":
            self.recent.append(answer.parts)
            self.bytes_up += answer.parts.bytes_up
            self.bytes_down += answer.parts.bytes_down


@dataclass
class CutModel:
    """One version of a model.

    Attributes:
        half: Which upper half is asked.
        lower: Runs the lower half.
        features: What that puts out.
        output: What the upper half puts out.
        codec: How features are encoded.
        deadline_s: Seconds that a request waits for the server's half.
        whole: Runs the whole network here; None where it is not loaded.
        figures: What became of the requests.
    """

    half: Half
    lower: Compute
    features: TensorSpec
    output: TensorSpec
    codec: Spec
    deadline_s: float
    ask: AskTop
    whole: Compute | None = None
    figures: CutFigures = field(default_factory=CutFigures)

    async def __call__(self, inputs: Array) -> CutAnswer:
        """Return what the network makes of a batch.

        Args:
            inputs: Of shape (B, ...) and the input's dtype.

        Raises:
            Unreachable: Nothing was heard from the server in time, and the whole network is not loaded here.
            InferenceRefused: The server's half was not run, and why; likewise.
        """
        try:
            answer = await self._by_server(inputs)
        except (Unreachable, InferenceRefused) as error:
            self.figures.refused[getattr(error, "reason", "unreachable")] += 1
            if self.whole is None:
                raise
            began = time.perf_counter()
            outputs = await self.whole(inputs)
            answer = CutAnswer(outputs, "device", RequestParts(time.perf_counter() - began))
        self.figures.count(answer)
        return answer

    async def _by_server(self, inputs: Array) -> CutAnswer:
        began = time.perf_counter()
        features = await self.lower(inputs)
        if not np.isfinite(features).all():
            raise InferenceRefused("the lower half's outputs are no finite numbers", reason="not-finite")
        parts = payload.pack(feature_codec.encode(self.features.name, features, self.codec))
        asked = time.perf_counter()
        reply = await self.ask(self.half, parts, self.deadline_s)
        answered = time.perf_counter()
        outputs = self._read(reply, len(inputs))
        server_s = reply.timing.waited_s + reply.timing.compute_s
        device_s = asked - began + time.perf_counter() - answered
        link_s = max(0.0, answered - asked - server_s)
        return CutAnswer(outputs, "server", RequestParts(device_s, link_s, server_s, reply.bytes_up, reply.bytes_down))

    def _read(self, reply: TopReply, count: int) -> Array:
        try:
            found = feature_codec.decode(payload.unpack(memoryview(reply.outputs)), self.output, MOST_OUTPUT_VALUES)
        except WireError as error:
            raise InferenceRefused(f"the server's outputs: {error}", reason=error.reason) from error
        if len(found) != count:
            raise InferenceRefused(f"the server gave {len(found)} outputs for {count} inputs", reason="shape")
        return found


def build_cut_model(
    lower: OpenModel, whole: OpenModel | None, config: CutSettings, ask: AskTop, executor: Executor
) -> CutModel:
    """Return a network of which the upper half is asked of the server.

    Args:
        whole: All of it; None where it is not to be loaded here.
        config: How the server is asked.
        executor: Computes here what takes long.
    """
    told = lower.manifest
    assert told.halves
    options: dict[str, bool | int | float | str] = {"bits": config.bits} if config.codec == "quantize" else {}
    return CutModel(
        half=Half(told.name, told.version, bytes.fromhex(told.parameters.sha256)),
        lower=_computing(lower, executor),
        features=lower.output,
        output=told.halves.top.output,
        codec=Spec(name=config.codec, options=options),
        deadline_s=config.deadline_s,
        ask=ask,
        whole=_computing(whole, executor) if whole else None,
    )


def _computing(model: OpenModel, executor: Executor) -> Compute:
    def run(inputs: Array) -> Array:
        try:
            return model.run(inputs)
        except Exception as error:  # of ONNX Runtime's C++ code, by no common class
            problem = str(error).strip().partition("\n")[0]
            raise InferenceRefused(f"the model failed: {problem or type(error).__name__}", reason="failed") from error

    async def compute(inputs: Array) -> Array:
        if model.quick_s * len(inputs) <= QUICK_S:
            return run(inputs)
        return await asyncio.get_running_loop().run_in_executor(executor, run, inputs)

    return compute
