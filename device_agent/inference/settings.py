"""What the inference process is started with: the operator's `[serve]`, and what follows from the board for the rest.

ONNX Runtime's own choices are none for a board. Its idle threads spin: a network of two million parameters cost 22 % of
a core at 20 requests a second instead of 2 %, and joules would be those of the spinning. Left to itself it also pins
one thread to every core, which fails in a container that has some of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared.errors import ConfigError
from shared.runtime import memory

if TYPE_CHECKING:  # the inference process reads no agent.toml, and has no memory to spare
    from device_agent.config import ServeConfig
    from device_agent.profile.schema import Inference

SPINNING_FROM_HZ = 30.0
"""Between fewer requests, threads that wait are asleep before the next one comes anyway."""
SMALL_BOARD_BYTES = 1 << 30
"""Of boards with less, ONNX Runtime keeps no memory of one inference for the next."""
SOCKET = "serve.sock"
MAX_SOCKET_PATH = 107
_SUPPLIES = "sys/class/power_supply"


class CutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the upper halves of networks are asked of the server.

    Attributes:
        codec: Of features: `dense`, `float16` or `quantize`.
        bits: Of a magnitude, by `quantize`.
        deadline_s: Seconds that a request waits for the server.
        whole: Whether whole networks are loaded too.
    """

    codec: str = "dense"
    bits: int = 8
    deadline_s: float = 2.0
    whole: bool = False


class InferenceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of the inference process, as JSON.

    Attributes:
        port: Of 127.0.0.1, 0 for none.
        socket: Path of the Unix socket, empty for none.
        provider: As `[serve]` names it.
        spin_us: For how long a thread that waits spins, in microseconds.
        arena: Whether ONNX Runtime keeps the memory of one inference for the next.
        max_batch: Examples of a request.
        patience_s: In which a request must have come.
        log_level: What it says on the agent's standard error.
        cut: How the upper halves of networks are asked of the server; None to run whole networks.
    """

    port: int
    socket: str
    memory_bytes: int
    provider: str = "cpu"
    threads: int = 1
    spin_us: int = 0
    arena: bool = True
    max_body_bytes: int = 16 << 20
    max_batch: int = 64
    patience_s: float = 10.0
    log_level: str = "warning"
    cut: CutSettings | None = None


def choose_settings(
    config: ServeConfig,
    state_dir: Path,
    log_level: str,
    usual: Inference,
    *,
    board_bytes: int | None = None,
    on_battery: bool = False,
) -> InferenceSettings:
    """Return what the process is started with.

    Args:
        state_dir: Where the Unix socket lies unless it is named.
        usual: What the board's firmware profile says of what the operator leaves out.
        board_bytes: What processes of ours may take on this board; None to ask the system.
        on_battery: Whether the board runs on one.

    Raises:
        ConfigError: The socket's path is longer than a system takes.
    """
    most = memory.default_limit() if board_bytes is None else board_bytes
    socket = config.socket or str(state_dir / SOCKET)
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(f"serve.socket: {socket}: more than {MAX_SOCKET_PATH} bytes; name a shorter path")
    threads = usual.threads if config.threads is None else config.threads
    arena = usual.arena if config.arena == "auto" else config.arena
    spins = threads > 1 and config.rate_hz >= SPINNING_FROM_HZ and not on_battery
    told = config.cut
    cut = CutSettings(codec=told.codec, bits=told.bits, deadline_s=told.deadline_s, whole=told.whole)
    return InferenceSettings(
        port=config.port,
        socket=socket,
        memory_bytes=config.memory_mb << 20 or most // 2,
        provider=config.provider or usual.provider,
        threads=threads,
        spin_us=usual.spin_us if spins else 0,
        arena=arena == "on" or (arena == "auto" and most >= SMALL_BOARD_BYTES),
        max_body_bytes=config.max_body_mb << 20,
        max_batch=config.max_batch,
        patience_s=config.patience_s,
        log_level=log_level,
        cut=cut if config.split else None,
    )


def runs_on_battery(root: Path) -> bool:
    """Tell whether a battery of the board is being emptied.

    Args:
        root: The board's root folder.
    """
    for supply in sorted((root / _SUPPLIES).glob("*")):
        try:
            kind, status = ((supply / name).read_text().strip() for name in ("type", "status"))
        except (OSError, UnicodeDecodeError):
            continue
        if kind == "Battery" and status == "Discharging":
            return True
    return False
