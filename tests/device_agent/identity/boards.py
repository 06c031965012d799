"""A board with its disk and its clock, and power cuts at every step of what it writes."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CURRENT, read_membership
from device_agent.identity.join import Join
from shared.errors import EnrolmentFailed
from tests.edge_server.gateway.enrolments import NOW, serving

DAY_S = 86_400.0


class Board:
    """A board with its disk, its clock, and a broker that lets it in or not."""

    def __init__(self, folder: Path, clock: BoardClock | None = None) -> None:
        self.state = folder
        folder.mkdir(exist_ok=True)
        self.clock = clock or BoardClock(utc_s=lambda: NOW, synchronised=lambda: True)
        self.proven: list[str] = []
        self.refusal = ""

    @property
    def used(self) -> Path:
        return self.state / credentials.FOLDER / CURRENT

    async def prove(self, broker, membership) -> str:
        ssl.create_default_context(cafile=broker.tls.ca).load_cert_chain(broker.tls.cert, broker.tls.key)
        self.proven.append(f"{membership.device}@{broker.host}:{broker.port}")
        return self.refusal

    async def join(self, token, device=""):
        return await Join(token, self.state, device, self.clock, self.prove).run()

    def joins(self, gateway, context, token=None, device=""):
        """Join at a gateway that serves for as long as it takes."""

        async def run():
            async with serving(gateway, context) as port:
                return await self.join(replace(token or gateway.token(), port=port), device)

        return asyncio.run(run())

    def is_usable(self) -> bool:
        """Tell whether what is in use, if anything is, belongs together."""
        if read_membership(self.used) is None:
            return False
        tls = credentials.tls_of(self.used)
        ssl.create_default_context(cafile=tls.ca).load_cert_chain(tls.cert, tls.key)
        return True


def failure(run) -> EnrolmentFailed:
    with pytest.raises(EnrolmentFailed) as raised:
        run()
    return raised.value


STEPS = 60
"""More than there are."""


class Killed(BaseException):
    """As a power cut would: nothing is tidied up."""


@contextmanager
def killed_after(steps: int) -> Iterator[list[int]]:
    """Kill at one of the syncs, renames and links inside the block; yields how many are left."""
    left = [steps]

    def dying(real):
        def run(*given, **more):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return real(*given, **more)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "symlink"):
            patch.setattr(os, name, dying(getattr(os, name)))
        yield left
