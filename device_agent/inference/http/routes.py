"""What the inference process answers to each path of the Open Inference Protocol, version 2."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable
from concurrent.futures import Executor
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from device_agent.inference.http.message import Request, Response, refusal
from device_agent.inference.http.tensors import Asked, describe, read_inference, write_inference
from device_agent.inference.models import NOT_FINITE, ServedModels, ServedVersion, statistics
from shared.errors import InferenceRefused, ServingRefused, Unreachable, WireError
from shared.protocol.inference.release import describe_class_fault
from shared.runtime.distributions import installed_version

if TYPE_CHECKING:
    from device_agent.inference.collaborative.cut_model import CutModel

log = logging.getLogger(__name__)

NOT_YET = "no model is served yet"
QUICK_S = 0.002
"""What takes longer is computed on a thread, so that others are answered meanwhile; going there costs 0.1 ms."""
KNOWN_PATHS = 16
PLATFORM = "onnxruntime_onnx"
PASSING = ("busy", "late", "unknown-release", "other-release")
"""Reasons for which the server's half does not answer now, and may later."""
_MODEL = re.compile(r"/v2/models/([A-Za-z0-9._-]{1,64})(?:/versions/([1-9]\d{0,8}))?(/ready|/infer|/stats|)")


class Routes:
    """Answers requests.

    Args:
        executor: Computes what takes long.
        max_batch: Most examples of a request.
    """

    def __init__(self, models: ServedModels, executor: Executor, max_batch: int) -> None:
        self._models, self._executor, self._max_batch = models, executor, max_batch

    def __call__(self, request: Request) -> Response | Awaitable[Response]:
        """Return the answer, or what will give it; never raises for what a peer sent."""
        found = _find_model(request.path)
        wanted = "POST" if found and found[2] == "/infer" else "GET"
        if not found and request.path not in ("/v2", "/v2/health/live", "/v2/health/ready"):
            return refusal(404, f"there is nothing at {request.path[:80]!r}")
        if request.method != wanted:
            return refusal(405, f"{wanted} is expected at {request.path[:80]!r}")
        if not found:
            return self._of_server(request.path)
        name, number, what = found
        served = self._models.find(name, number)
        if served is None and not self._models.names():
            return refusal(503, NOT_YET)  # it has just been started: there may be in a moment
        if served is None:
            of = f"version {number} of model {name!r}" if number else f"model {name!r}"
            return refusal(404, f"{of} is not served here; there is {', '.join(self._models.names()) or 'none'}")
        return self._infer(served, request) if what == "/infer" else self._tell(served, what)

    def _of_server(self, path: str) -> Response:
        if path == "/v2":
            return Response(
                200,
                msgspec.json.encode(
                    {"name": "fieldfleet", "version": _version(), "extensions": ["binary_tensor_data"]}
                ),
            )
        is_well = path.endswith("live") or bool(self._models.names())
        return Response(200, b"") if is_well else refusal(503, NOT_YET)

    def _tell(self, served: ServedVersion, what: str) -> Response:
        """Return what is asked about a model."""
        if what == "/stats":
            return Response(200, msgspec.json.encode({"model_stats": [statistics(served)]}))
        return Response(200, b"" if what == "/ready" else self._describe(served))

    def _describe(self, served: ServedVersion) -> bytes:
        """Return the metadata of a model, with what an application must know to ask it."""
        model, told = served.model, served.model.manifest
        about: dict[str, Any] = {
            "classes": () if describe_class_fault(told.classes, served.output.shape) else told.classes,
            "preprocessing": told.preprocessing,
            "accuracy": told.source.accuracy,
            "provider": model.provider,
        }
        return msgspec.json.encode(
            {
                "name": told.name,
                "versions": [str(one) for one in self._models.versions(told.name)],
                "platform": PLATFORM,
                "inputs": [describe(model.input)],
                "outputs": [describe(served.output)],
                "parameters": about,
            }
        )

    def _infer(self, served: ServedVersion, request: Request) -> Response | Awaitable[Response]:
        model = served.model
        if coding := request.headers.get("content-encoding"):
            return refusal(415, f"a body coded as {coding[:20]!r} is not taken; send it as it is")
        length = request.headers.get("inference-header-content-length")
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) <= len("1234567890")):
            return refusal(400, "Inference-Header-Content-Length is no number")
        try:
            asked = read_inference(
                request.body, None if length is None else int(length), model.input, served.output, self._max_batch
            )
        except WireError as error:
            return refusal(400, str(error))
        if served.cut:
            return _answered_cut(served, served.cut, asked)
        if model.quick_s * len(asked.inputs) <= QUICK_S:
            return _answered(served, asked)
        return asyncio.get_running_loop().run_in_executor(self._executor, _answered, served, asked)


@lru_cache(maxsize=KNOWN_PATHS)
def _find_model(path: str) -> tuple[str, int, str] | None:
    """Return model, version (0 for none) and what of it a path names; None where it names no model."""
    found = _MODEL.fullmatch(path)
    return (found[1], int(found[2] or 0), found[3]) if found else None


def _answered(served: ServedVersion, asked: Asked) -> Response:
    """Compute an answer."""
    told = served.model.manifest
    try:
        outputs = served.run(asked.inputs)
    except ValueError as error:
        return refusal(400, str(error))
    except ServingRefused as error:
        log.warning("model %s: %s", told.reference, error)
        return refusal(500, str(error))
    body, json_bytes = write_inference(outputs, served.model.output, (told.name, told.version), asked)
    return Response(200, body, json_bytes)


async def _answered_cut(served: ServedVersion, cut: CutModel, asked: Asked) -> Response:
    """Compute an answer of which the upper half is the server's; where that cannot be had, say so with 503."""
    told = served.model.manifest
    try:
        answer = await served.run_cut(cut, asked.inputs)
    except Unreachable as error:
        return refusal(503, f"the server's half of the model is out of reach: {error}")
    except InferenceRefused as error:
        if error.reason == NOT_FINITE and not np.isfinite(asked.inputs).all():
            return refusal(400, "the input holds numbers that are NaN or infinite")
        log.warning("model %s: %s: %s", told.reference, error.reason, error)
        return refusal(503 if error.reason in PASSING else 500, f"{error.reason}: {error}")
    parts = {"computed_by": answer.by, **asdict(answer.parts)}
    body, json_bytes = write_inference(answer.outputs, served.output, (told.name, told.version), asked, parts)
    return Response(200, body, json_bytes)


def _version() -> str:
    return installed_version("fieldfleet") or "unknown"  # where it is run from a folder that was never installed
