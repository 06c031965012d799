"""Blocking connect call in a separate thread, with a cancellable wait.

`asyncio.run` waits at its end for its own threads: a name that no server resolves would delay the end of a process by
a minute.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from shared.errors import Unreachable


async def dial_in_thread(dial: Callable[[], object], hang_up: Callable[[], object]) -> None:
    """Run `dial` on its own thread; if the caller is cancelled, the thread calls `hang_up` after connecting.

    Raises:
        OSError: From `dial`.
        ValueError: From `dial`.
        Unreachable: From `dial`.
    """
    loop, abandoned = asyncio.get_running_loop(), threading.Event()
    done: asyncio.Future[None] = loop.create_future()

    def work() -> None:
        error: Exception | None = RuntimeError("connecting failed unexpectedly; see the thread's traceback")
        try:
            dial()
            error = None
        except (OSError, ValueError, Unreachable) as known:
            error = known
        finally:
            if abandoned.is_set():
                hang_up()
            else:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
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
