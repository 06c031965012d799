"""Routes of the Open Inference Protocol, version 2."""

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

from device_agent.inference.http.message import Request, Response, make_refusal
from device_agent.inference.http.tensors import InferenceRequest, describe_tensor, read_inference, write_inference
from device_agent.inference.models import NOT_FINITE, ServedModels, ServedVersion, describe_statistics
from shared.errors import InferenceRefused, ServingRefused, Unreachable, WireError
from shared.protocol.inference.release import describe_class_fault
from shared.runtime.distributions import installed_version

if TYPE_CHECKING:
    from device_agent.inference.collaborative.cut_model import CutModel

log = logging.getLogger(__name__)

NOT_YET = "no model is served yet"
QUICK_S = 0.002
"""Longer computations run in a thread, so that other requests are answered meanwhile; the hand-over costs 0.1 ms."""
CACHED_PATHS = 16
PLATFORM = "onnxruntime_onnx"
TRANSIENT = ("busy", "late", "unknown-release", "other-release")
"""Reasons of the server's upper half that may pass on a retry."""
_MODEL = re.compile(r"/v2/models/([A-Za-z0-9._-]{1,64})(?:/versions/([1-9]\d{0,8}))?(/ready|/infer|/stats|)")


class Routes:
    """Request handler.

    Args:
        max_batch: Most examples of a request.
    """

    def __init__(self, models: ServedModels, executor: Executor, max_batch: int) -> None:
        self._models, self._executor, self._max_batch = models, executor, max_batch

    def __call__(self, request: Request) -> Response | Awaitable[Response]:
        """Return the response or an awaitable of it; never raises because of a peer's data."""
        route = _find_model(request.path)
        method = "POST" if route and route[2] == "/infer" else "GET"
        if not route and request.path not in ("/v2", "/v2/health/live", "/v2/health/ready"):
            return make_refusal(404, f"unknown path {request.path[:80]!r}")
        if request.method != method:
            return make_refusal(405, f"use {method} for {request.path[:80]!r}")
        if not route:
            return self._answer_server(request.path)
        name, number, what = route
        served = self._models.find(name, number)
        if served is None and not self._models.names():
            return make_refusal(503, NOT_YET)  # the process may just have been started
        if served is None:
            subject = f"version {number} of model {name!r}" if number else f"model {name!r}"
            return make_refusal(404, f"{subject} is not served; available models: {', '.join(self._models.names())}")
        return self._infer(served, request) if what == "/infer" else self._tell(served, what)

    def _answer_server(self, path: str) -> Response:
        if path == "/v2":
            return Response(
                200,
                msgspec.json.encode(
                    {"name": "fieldfleet", "version": _version(), "extensions": ["binary_tensor_data"]}
                ),
            )
        is_well = path.endswith("live") or bool(self._models.names())
        return Response(200, b"") if is_well else make_refusal(503, NOT_YET)

    def _tell(self, served: ServedVersion, what: str) -> Response:
        """Return readiness, statistics or metadata of a model."""
        if what == "/stats":
            return Response(200, msgspec.json.encode({"model_stats": [describe_statistics(served)]}))
        return Response(200, b"" if what == "/ready" else self._describe(served))

    def _describe(self, served: ServedVersion) -> bytes:
        """Return the metadata of a model, with what an application needs to call it."""
        model, manifest = served.model, served.model.manifest
        about: dict[str, Any] = {
            "classes": () if describe_class_fault(manifest.classes, served.output.shape) else manifest.classes,
            "preprocessing": manifest.preprocessing,
            "accuracy": manifest.source.accuracy,
            "provider": model.provider,
        }
        if manifest.task is not msgspec.UNSET:
            about |= {"task": manifest.task.kind, "metrics": manifest.task.values}
        return msgspec.json.encode(
            {
                "name": manifest.name,
                "versions": [str(version) for version in self._models.versions(manifest.name)],
                "platform": PLATFORM,
                "inputs": [describe_tensor(model.input)],
                "outputs": [describe_tensor(served.output)],
                "parameters": about,
            }
        )

    def _infer(self, served: ServedVersion, request: Request) -> Response | Awaitable[Response]:
        model = served.model
        if coding := request.headers.get("content-encoding"):
            return make_refusal(415, f"content encoding {coding[:20]!r} is not supported; send the body unencoded")
        length = request.headers.get("inference-header-content-length")
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) <= len("1234567890")):
            return make_refusal(400, f"Inference-Header-Content-Length {length[:20]!r} is not a number")
        try:
            inference = read_inference(
                request.body, None if length is None else int(length), model.input, served.output, self._max_batch
            )
        except WireError as error:
            return make_refusal(400, str(error))
        if served.cut:
            return _answer_cut(served, served.cut, inference)
        if model.quick_s * len(inference.inputs) <= QUICK_S:
            return _answer(served, inference)
        return asyncio.get_running_loop().run_in_executor(self._executor, _answer, served, inference)


@lru_cache(maxsize=CACHED_PATHS)
def _find_model(path: str) -> tuple[str, int, str] | None:
    """Return the model, version (0 for none) and subresource of a path; None if it names no model."""
    match = _MODEL.fullmatch(path)
    return (match[1], int(match[2] or 0), match[3]) if match else None


def _answer(served: ServedVersion, inference: InferenceRequest) -> Response:
    """Run an inference."""
    manifest = served.model.manifest
    try:
        outputs = served.run(inference.inputs)
    except ValueError as error:
        return make_refusal(400, str(error))
    except ServingRefused as error:
        log.warning("model %s: %s", manifest.reference, error)
        return make_refusal(500, str(error))
    body, json_bytes = write_inference(outputs, served.model.output, (manifest.name, manifest.version), inference)
    return Response(200, body, json_bytes)


async def _answer_cut(served: ServedVersion, cut: CutModel, inference: InferenceRequest) -> Response:
    """Run an inference of a split network; status 503 if the server's half is not available."""
    manifest = served.model.manifest
    try:
        answer = await served.run_cut(cut, inference.inputs)
    except Unreachable as error:
        return make_refusal(503, f"the server's half of the model is unreachable: {error}")
    except InferenceRefused as error:
        if error.reason == NOT_FINITE and not np.isfinite(inference.inputs).all():
            return make_refusal(400, "the input contains NaN or infinite numbers")
        log.warning("model %s: %s: %s", manifest.reference, error.reason, error)
        return make_refusal(503 if error.reason in TRANSIENT else 500, f"{error.reason}: {error}")
    parts = {"computed_by": answer.by, **asdict(answer.parts)}
    body, json_bytes = write_inference(
        answer.outputs, served.output, (manifest.name, manifest.version), inference, parts
    )
    return Response(200, body, json_bytes)


def _version() -> str:
    return installed_version("fieldfleet") or "unknown"  # not installed when run from a checkout
