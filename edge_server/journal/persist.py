"""A full disk is waited for: a run on a roof goes on once somebody has made room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shared.errors import Unwritable
from shared.runtime.executor import Worker

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

RETRY_S = 3.0


async def persist(
    worker: Worker, retry_s: float | None, write: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Write, and again after `retry_s` for as long as the disk refuses; None to give up at once.

    Raises:
        Unwritable: The disk refuses, and nobody waits for it.
    """
    refused = False
    while True:
        try:
            result = await worker(write, *args, **kwargs)
        except Unwritable as error:
            if retry_s is None:
                raise
            if not refused:
                log.error("%s; waiting, and trying again every %.0f s", error, retry_s)  # noqa: TRY400 - not a fault
            refused = True
            await asyncio.sleep(retry_s)
        else:
            if refused:
                log.info("the disk takes it again")
            return result
