"""What a device agent is told by its file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.chunks import FRAME_BYTES, MAX_FRAME_BYTES, MAX_WINDOW, is_frame_size
from shared.config import read
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.messages import BLOCK_BYTES
from shared.topics import checked_name
from shared.transport.base import Broker

MAX_MEMORY_MB = 1 << 20
MAX_THREADS = 1024


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that trains.

    Attributes:
        idle_s: Seconds without a task after which it is ended.
        memory_mb: Most memory it may take, in MiB; 0 for no limit.
        threads: Threads of torch; 0 for torch's own choice.
    """

    idle_s: float = 300.0
    memory_mb: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        """Refuse what no process can be given."""
        if not self.idle_s >= 0:
            raise ValueError(f"idle_s must be 0 or more seconds, not {self.idle_s}")
        if not 0 <= self.memory_mb <= MAX_MEMORY_MB or not 0 <= self.threads <= MAX_THREADS:
            most = f"{MAX_MEMORY_MB} and {MAX_THREADS}"
            raise ValueError(f"memory_mb and threads must be 0, for no limit, or more, up to {most}")


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How payloads travel.

    Attributes:
        frame_bytes: Payload bytes in one MQTT message, less where the broker or a slow link bears less.
        window: Frames under way at once.
        patience_s: Seconds without a frame after which frames are asked for again.
        max_payload_mb: Largest payload accepted, in MiB.
    """

    frame_bytes: int = FRAME_BYTES
    window: int = 16
    patience_s: float = 2.0
    max_payload_mb: int = 2048

    def __post_init__(self) -> None:
        """Refuse what the protocol cannot carry."""
        if not is_frame_size(self.frame_bytes) or not 1 <= self.window <= MAX_WINDOW:
            sizes = f"{BLOCK_BYTES} to {MAX_FRAME_BYTES} in steps of {BLOCK_BYTES}"
            raise ValueError(f"frame_bytes must be {sizes}, window 1 to {MAX_WINDOW}")
        if not self.patience_s > 0 or self.max_payload_mb < 1:
            raise ValueError("patience_s must be above zero, max_payload_mb 1 or more")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device.

    Attributes:
        device: Its id, unique within the site.
        site: The site its edge server serves.
        state_dir: Folder that survives reboots: outbox, device state, spooled payloads.
        data: Its own examples.
        outbox_mb: Most that updates waiting for the server may take on the disk, in MiB; where the next one would
            not fit, its task fails.
        report_s: Seconds between reports.
        log_level: debug, info, warning or error.
    """

    device: str
    state_dir: str
    data: Data
    site: str = "lab"
    broker: Broker = Broker()
    trainer: TrainerConfig = TrainerConfig()
    link: LinkConfig = LinkConfig()
    outbox_mb: int = 4096
    report_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Refuse a pause that is none, and an outbox that holds nothing."""
        if not self.report_s > 0:
            raise ValueError(f"report_s must be above zero, not {self.report_s}")
        if self.outbox_mb < 1:
            raise ValueError(f"outbox_mb must be 1 or more, not {self.outbox_mb}")


def load(path: Path) -> AgentConfig:
    """Read an agent's file.

    Raises:
        ConfigError: As `shared.config.read`, or a name or level cannot be used.
    """
    config = read(path, AgentConfig)
    checked_name(config.device, f"{path}: device")
    checked_name(config.site, f"{path}: site")
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"{path}: log_level: {config.log_level!r}; use debug, info, warning or error")
    return config
