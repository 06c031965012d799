"""Entry point of the inference process: commands on stdin, inference over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from device_agent.inference.messages import (
    EXIT_TAKEN,
    Applied,
    Ask,
    FromInference,
    Load,
    Loaded,
    Ready,
    Refused,
    Switch,
    ToInference,
    Unload,
    encode_frame,
    read_frame,
    to_inference,
)
from device_agent.inference.settings import InferenceSettings
from shared.errors import ConfigError, FieldFleetError
from shared.runtime import backports, malloc, memory, processes
from shared.runtime.clock import monotonic

if TYPE_CHECKING:
    from device_agent.inference.collaborative.pipe import TopPipe
    from device_agent.inference.models import ServedModels

EXIT_GARBLED = 70

logger = logging.getLogger("inference")


class LoadContext(NamedTuple):
    """Arguments shared by all model loads.

    Attributes:
        ask: Client for upper halves on the server; None if networks run whole.
    """

    settings: InferenceSettings
    executor: ThreadPoolExecutor
    ask: TopPipe | None


def main() -> None:
    """Serve until the agent exits."""
    processes.die_with_parent(sys.stdin.fileno())  # otherwise the port is still taken when the next agent starts
    settings = msgspec.json.decode(sys.argv[1], type=InferenceSettings)
    processes.configure(settings.log_level)
    processes.end_on_thread_failure()
    processes.keep_private()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    out = os.dup(1)
    os.dup2(2, 1)  # keep output of libraries out of the replies
    malloc.tune()
    memory.limit_data(settings.memory_bytes)
    memory.prefer_oom_kill()
    sys.exit(backports.run(serve(settings, out, int(sys.argv[2]) if settings.cut else None)))


async def serve(settings: InferenceSettings, out: int, tops: int | None = None) -> int:
    """Serve commands and inference requests until the agent exits; return the exit code.

    Args:
        out: Descriptor of the pipe to the agent.
        tops: Descriptor of the socket for upper-half requests to the agent; None if networks run whole.
    """
    from device_agent.inference.http.routes import Routes  # noqa: PLC0415 - after the limit of memory is set
    from device_agent.inference.http.server import HttpServer  # noqa: PLC0415
    from device_agent.inference.models import ServedModels  # noqa: PLC0415

    models = ServedModels()
    agent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(agent), sys.stdin.buffer)
    with ThreadPoolExecutor(1, "inference") as executor:
        opening = LoadContext(settings, executor, await _open_top_pipe(tops))
        routes = Routes(models, executor, settings.max_batch)
        http = HttpServer(routes, settings.max_body_bytes, settings.patience_s, monotonic)
        try:
            await http.listen(settings.port, settings.socket)
        except ConfigError as error:
            logger.critical("cannot listen: %s", error)
            return EXIT_TAKEN
        sweeping = asyncio.create_task(http.sweep())
        try:
            os.write(out, encode_frame(Ready()))
            while (message := await read_frame(agent, to_inference)) is not None:
                os.write(out, encode_frame(await _handle(message, models, opening)))
        except msgspec.DecodeError as error:
            logger.critical("the agent sent an invalid message: %s; exiting", error)
            return EXIT_GARBLED
        except BrokenPipeError:
            pass  # the agent is gone
        finally:
            sweeping.cancel()
            http.close()
    return 0


async def _handle(message: ToInference, models: ServedModels, opening: LoadContext) -> FromInference:
    """Execute a command and return its reply."""
    name, version = message.name, message.version
    try:
        match message:
            case Load():
                return await _load(message, models, opening)
            case Ask():
                return models.figures(name, version)
            case Switch():
                models.switch(name, version)
            case Unload():
                models.unload(name, version)
    except FieldFleetError as error:
        return Refused(str(error))
    except MemoryError as error:
        return Refused(f"out of memory: {error}; raise serve.memory_mb")
    return Applied()


async def _open_top_pipe(descriptor: int | None) -> TopPipe | None:
    """Return the client for upper halves on the server; None without a descriptor."""
    if descriptor is None:
        return None
    from device_agent.inference.collaborative.pipe import TopPipe  # noqa: PLC0415 - most boards need none

    pipe = TopPipe(*await asyncio.open_connection(sock=socket.socket(fileno=descriptor)))
    pipe.reader_task = asyncio.create_task(pipe.run(), name="upper halves")
    return pipe


async def _load(message: Load, models: ServedModels, opening: LoadContext) -> FromInference:
    """Open a model in a thread while requests continue."""
    from device_agent.inference.session import open_model  # noqa: PLC0415 - see above
    from shared.protocol.inference.release import BOTTOM  # noqa: PLC0415 - see above

    models.require_room(message.name, message.version)
    parts = {name: Path(path) for name, path in message.parts.items()}
    settings, cut = opening.settings, opening.settings.cut
    is_half = cut is not None and BOTTOM in parts
    own_path = None if is_half or not message.own else Path(message.own)
    model = await asyncio.to_thread(open_model, message.manifest, parts, settings, is_half=is_half, own_path=own_path)
    if cut is None or opening.ask is None or not is_half:
        models.add(model)
    else:
        from device_agent.inference.collaborative.cut_model import build_cut_model  # noqa: PLC0415 - see above

        full_model = await asyncio.to_thread(open_model, message.manifest, parts, settings) if cut.whole else None
        models.add(model, build_cut_model(model, full_model, cut, opening.ask, opening.executor))
    return Loaded(model.seconds, model.provider)


if __name__ == "__main__":
    main()
