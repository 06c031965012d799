"""The clients of `bench-inference`, against a server that answers at once."""

from __future__ import annotations

import asyncio

import pytest

from device_agent.commands.bench_inference import time_concurrent_requests
from device_agent.inference.http.message import Response, make_refusal
from device_agent.inference.http.server import HttpServer
from shared.errors import ConfigError
from shared.runtime.clock import monotonic

REQUEST = b"POST /infer HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
SECONDS = 0.05


@pytest.mark.parametrize("clients", [1, 3])
async def test_every_client_has_one_request_under_way_and_all_are_answered(tmp_path, clients):
    seen = []

    def answer(request):
        seen.append(request.body)
        return Response(200, b"{}")

    server = HttpServer(answer, 1000, 10.0, monotonic)
    await server.listen(0, str(tmp_path / "s"))
    taken = await asyncio.to_thread(time_concurrent_requests, str(tmp_path / "s"), REQUEST, SECONDS, clients)
    server.close()
    assert len(taken) == len(seen) >= clients
    assert set(seen) == {b"abc"}
    assert min(taken) > 0


async def test_a_refusal_ends_it(tmp_path):
    server = HttpServer(lambda _: make_refusal(404, "nothing is served here"), 1000, 10.0, monotonic)
    await server.listen(0, str(tmp_path / "s"))
    with pytest.raises(ConfigError, match="nothing is served here"):
        await asyncio.to_thread(time_concurrent_requests, str(tmp_path / "s"), REQUEST, SECONDS, 2)
    server.close()


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("size", [0, 100, 70_000, 1_500_000])
async def test_answers_of_any_size_are_read_whole(tmp_path, clients, size):
    """Of binary tensors another header, Inference-Header-Content-Length, gives the size of a part of the body."""
    answered = []

    def answer(request):
        assert request.body == b"abc"
        answered.append(request)
        return Response(200, b"x" * size, min(size, 7))

    server = HttpServer(answer, 4_000_000, 10.0, monotonic)
    await server.listen(0, str(tmp_path / "s"))
    taken = await asyncio.to_thread(time_concurrent_requests, str(tmp_path / "s"), REQUEST, SECONDS, clients)
    server.close()
    assert len(taken) == len(answered) >= clients
