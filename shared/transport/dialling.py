"""A blocking call to connect, on a thread of its own, that a cancelled caller leaves behind.

`asyncio.run` ends by waiting for what runs in its own threads: a name that no server resolves would hold up the end of
a process for a minute.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from shared.errors import Unreachable


async def dialled(dial: Callable[[], object], hang_up: Callable[[], object]) -> None:
    """Run `dial` on a thread of its own; when the caller is cancelled, the thread hangs up what it still reaches.

    Raises:
        OSError: As `dial` does.
        ValueError: As `dial` does.
        Unreachable: As `dial` does.
    """
    loop, abandoned = asyncio.get_running_loop(), threading.Event()
    done: asyncio.Future[None] = loop.create_future()

    def work() -> None:
        error: Exception | None = RuntimeError("connecting failed in a way nobody expects; see the thread's traceback")
        try:
            dial()
            error = None
        except (OSError, ValueError, Unreachable) as known:
            error = known
        finally:
            if abandoned.is_set():
                hang_up()
            else:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_settle, done, error)

    threading.Thread(target=work, name="dial", daemon=True).start()
    try:
        await done
    except asyncio.CancelledError:
        abandoned.set()
        raise


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error:
        done.set_exception(error)
    else:
        done.set_result(None)
