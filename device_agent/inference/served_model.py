"""Client of the inference process for one model; repeats requests if the process dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from device_agent.inference.messages import Figures
from shared.errors import ServingDied, ServingRefused

MAX_TRIES = 3
"""Times that a request is sent to an inference process that keeps dying."""


class Serving(Protocol):
    """Interface to the inference process.

    A restarted process serves again what its predecessor did. Requests wait until a process is ready.
    """

    @property
    def starts(self) -> int:
        """Number of process starts since the agent started."""

    async def load(self, name: str, version: int) -> None:
        """Load a version beside the active one; loading it again is allowed.

        Raises:
            ServingRefused: It cannot be loaded; `ServingDied` if the process died meanwhile.
        """

    async def switch(self, name: str, version: int) -> None:
        """Activate a loaded version; running requests finish on the old one.

        Raises:
            ServingRefused: It is not loaded.
        """

    async def unload(self, name: str, version: int) -> None:
        """Unload a version (0: all inactive ones) after its running requests; ignore one that is not loaded."""

    async def figures(self, name: str, version: int) -> Figures:
        """Return a version's statistics since it was loaded.

        Raises:
            ServingRefused: It is not loaded.
        """


@dataclass(frozen=True)
class ServedModel:
    """Versions of one model in the inference process."""

    name: str
    serving: Serving

    async def load(self, version: int) -> str:
        """Load a version beside the active one; return the reason of a failure, or ""."""
        return await self._ask(self.serving.load, version)

    async def activate(self, version: int) -> str:
        """Activate a version, loading it first if needed; return the reason of a failure, or ""."""
        if not await self._ask(self.serving.switch, version):
            return ""
        return await self.load(version) or await self._ask(self.serving.switch, version)

    async def _ask(self, what: Callable[[str, int], Awaitable[None]], version: int) -> str:
        """Send a request to the process, again if the process dies; return the reason of a refusal, or ""."""
        reason = ""
        for _ in range(MAX_TRIES):
            try:
                await what(self.name, version)
            except ServingDied as error:
                reason = str(error)
            except ServingRefused as error:
                return str(error)
            else:
                return ""
        return reason

    async def unload(self, version: int) -> None:
        """Unload a version; without a process there is nothing to do."""
        with suppress(ServingRefused):
            await self.serving.unload(self.name, version)

    async def figures(self, version: int) -> Figures:
        """Return a version's statistics; zeros if it is not loaded."""
        if version:
            with suppress(ServingRefused):
                return await self.serving.figures(self.name, version)
        return Figures(self.name, version)
