"""Start parameters of the inference process, from `[serve]` and the board.

ONNX Runtime's defaults do not suit a board. Its idle threads spin: a network of two million parameters took 22 % of a
core at 20 requests a second instead of 2 %, and measured energy would be the spinning's. It also pins one thread to
every core, which fails in a container that may use only some of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared.errors import ConfigError
from shared.runtime import memory

if TYPE_CHECKING:  # the inference process must stay small and does not read agent.toml
    from device_agent.config import ServeConfig
    from device_agent.profile.schema import Inference

SPINNING_FROM_HZ = 30.0
"""Below this request rate, waiting threads fall asleep before the next request anyway."""
SMALL_BOARD_BYTES = 1 << 30
"""Memory below which ONNX Runtime frees its arena after every inference."""
SOCKET = "serve.sock"
MAX_SOCKET_PATH = 107
_SUPPLIES = "sys/class/power_supply"


class CutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Collaborative inference: how upper halves are requested from the server.

    Attributes:
        codec: Feature codec: `dense`, `float16` or `quantize`.
        bits: Bits of a magnitude, for `quantize`.
        deadline_s: Seconds that a request waits for the server.
        whole: Whether the whole network is loaded too, as a fallback.
    """

    codec: str = "dense"
    bits: int = 8
    deadline_s: float = 2.0
    whole: bool = False


class InferenceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of the inference process, as JSON.

    Attributes:
        port: Port on 127.0.0.1; 0 for none.
        socket: Path of the Unix socket; empty for none.
        provider: Provider as named in `[serve]`.
        spin_us: Microseconds that a waiting thread spins.
        arena: Whether ONNX Runtime keeps memory between inferences.
        max_batch: Most examples of a request.
        patience_s: Seconds within which a request must have arrived.
        log_level: Threshold of its messages on the agent's standard error.
        cut: Settings of collaborative inference; None to run whole networks.
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
    """Return the settings of the inference process.

    Args:
        state_dir: Folder of the Unix socket if the configuration names none.
        usual: Defaults of the board's firmware profile.
        board_bytes: Memory that fieldfleet may use on this board; None to query the system.
        on_battery: Whether the board is discharging a battery; no thread spins then.

    Raises:
        ConfigError: The socket's path is too long.
    """
    most = memory.default_limit() if board_bytes is None else board_bytes
    socket = config.socket or str(state_dir / SOCKET)
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(f"serve.socket: {socket}: more than {MAX_SOCKET_PATH} bytes; name a shorter path")
    threads = usual.threads if config.threads is None else config.threads
    arena = usual.arena if config.arena == "auto" else config.arena
    spins = threads > 1 and config.rate_hz >= SPINNING_FROM_HZ and not on_battery
    split = config.cut
    cut = CutSettings(codec=split.codec, bits=split.bits, deadline_s=split.deadline_s, whole=split.whole)
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
    """Return True if a battery of the board is discharging.

    Args:
        root: Root of the board's file system, `/` except in tests.
    """
    for supply in sorted((root / _SUPPLIES).glob("*")):
        try:
            kind, status = ((supply / name).read_text().strip() for name in ("type", "status"))
        except (OSError, UnicodeDecodeError):
            continue
        if kind == "Battery" and status == "Discharging":
            return True
    return False
