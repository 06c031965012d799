"""Configuration of an edge server (`server.toml`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from shared.config import read
from shared.errors import ConfigError
from shared.protocol.messages import BLOCK_BYTES
from shared.protocol.topics import check_name
from shared.registry import require_entries
from shared.transfer.frames import FRAME_BYTES, MAX_FRAME_BYTES, MAX_WINDOW, is_frame_size
from shared.transfer.receiver import Policy
from shared.transport.base import Broker, resolve_broker_paths

MAX_THREADS, MAX_FEATURES_MB, MAX_KEPT_MB = 1024, 4096, 1 << 20
MAX_KEEP_DAYS, MAX_KEEP_MB = 3660, 1 << 20
MAX_WAITING, MAX_OPEN = 4096, 256


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfer of payloads.

    Attributes:
        frame_bytes: Payload bytes per MQTT message; fewer if the broker or a slow link requires it.
        window: Frames of one device in flight to the server.
        budget: Frames of all devices together in flight to the server; bounds its memory.
        patience_s: Seconds without a frame after which frames are requested again, and seconds that one device may
            delay the others on the shared topic before it is served separately.
        max_features_mb: MiB of features that the server accepts from a device per step; they are held in memory.
        kept_gradients_mb: MiB of gradients of all devices that are stored until their split round ends: a device whose
            trainer was killed repeats its steps with them, and misses the steps beyond this limit. The first 16 MiB
            are in memory, the rest in a file of the run's folder.
    """

    frame_bytes: int = FRAME_BYTES
    window: int = 16
    budget: int = 48
    patience_s: float = 1.0
    max_features_mb: int = 64
    kept_gradients_mb: int = 256

    def __post_init__(self) -> None:
        """Reject values that the protocol does not support."""
        if not is_frame_size(self.frame_bytes) or not 1 <= self.window <= MAX_WINDOW:
            sizes = f"{BLOCK_BYTES} to {MAX_FRAME_BYTES} in steps of {BLOCK_BYTES}"
            raise ValueError(f"frame_bytes must be {sizes}, window 1 to {MAX_WINDOW}")
        if self.budget < 1 or not self.patience_s > 0:
            raise ValueError("budget must be >= 1, patience_s > 0")
        if not 1 <= self.max_features_mb <= MAX_FEATURES_MB:
            raise ValueError(f"max_features_mb must be 1 to {MAX_FEATURES_MB}")
        if not 0 <= self.kept_gradients_mb <= MAX_KEPT_MB:
            raise ValueError(f"kept_gradients_mb must be 0 to {MAX_KEPT_MB}")

    def policy(self, limit: int) -> Policy:
        """Return the receiving policy for payloads of at most `limit` bytes."""
        return Policy(self.window, self.patience_s, limit, frame_bytes=self.frame_bytes, budget=self.budget)


class ReadingsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Storage of device reports in `data_dir/readings.sqlite`.

    Attributes:
        keep_days: Age in days at which reports are deleted; 0: no report is stored.
        max_mb: Maximum MiB of the file; beyond it, the oldest reports of the device with the largest share are deleted
            first.
    """

    keep_days: float = 14.0
    max_mb: int = 256

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if not 0 <= self.keep_days <= MAX_KEEP_DAYS or not 1 <= self.max_mb <= MAX_KEEP_MB:
            raise ValueError(f"keep_days must be 0 to {MAX_KEEP_DAYS}, max_mb 1 to {MAX_KEEP_MB}")


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation, the server's part of a split network, and training on the server.

    Attributes:
        device: `cpu`, `cuda` for a GPU, or `auto` for the GPU if torch can use one. Aggregates stay on the CPU.
        plugins: Networks, algorithms, codecs, allocators, losses, metrics and sources from outside that plans may
            name: `module:attribute`, `distribution:name` for an entry point, or `module:*` for all that a module
            defines; in addition to those of FIELDFLEET_PLUGINS.
    """

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    plugins: list[str] = []

    def __post_init__(self) -> None:
        """Reject entries that are no names of plugins."""
        require_entries(self.plugins, "plugins")


class TopsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of `edge-server serve-tops`: upper halves of releases, run on features that devices send.

    Attributes:
        threads: Threads of ONNX Runtime per request; requests run one at a time.
        max_features_mb: MiB of the features of one request, both encoded and as float32.
        held_mb: MiB of the features of all pending requests together, in memory.
        waiting: Maximum number of pending requests of all devices; each device has at most one.
        releases: Number of upper halves that stay loaded; the least recently used is unloaded first.
    """

    threads: int = 1
    max_features_mb: int = 16
    held_mb: int = 256
    waiting: int = 64
    releases: int = 4

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS}")
        if not 1 <= self.max_features_mb <= min(self.held_mb, MAX_FEATURES_MB) or self.held_mb > MAX_KEPT_MB:
            raise ValueError(f"max_features_mb must be 1 to {MAX_FEATURES_MB}, held_mb at least that much")
        if not 1 <= self.waiting <= MAX_WAITING or not 1 <= self.releases <= MAX_OPEN:
            raise ValueError(f"waiting must be 1 to {MAX_WAITING}, releases 1 to {MAX_OPEN}")


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another site of the same run, to whose broker this server connects.

    Attributes:
        site: Name of the other site, as in the plan's `[sites] clusters`.
        broker: Address of its broker as seen from this server, and this server's credentials there.
        user: Same as `broker.user`, in files of older versions.
        password_file: Same as `broker.password_file`, in files of older versions.
    """

    site: str
    broker: Broker = Broker()
    user: str = ""
    password_file: str = ""

    def __post_init__(self) -> None:
        """Reject a password without user, and two logins."""
        if self.password_file and not self.user:
            raise ValueError("password_file is set without user; add the user")
        if self.user and self.broker.user:
            raise ValueError("user is set in [peer] and in [peer.broker]; keep the one in [peer.broker]")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Edge server of one site. Relative paths start at the folder of the file.

    Attributes:
        plan: Trial plan to run; empty: only the plans of the queue, see `edge-server submit`.
        run: Name of the run; empty: resume an unfinished run of the same plan, or else start a new one.
        data_dir: Folder of the site's runs.
        data_root: Folder that relative data paths of plans start from.
        site: Name of the site, as in the agents' files; required in a file.
        gateway: Folder of the site, as created by `edge-server site init`: devices revoked there are excluded
            immediately. Empty if there is none.
        strangers: Whether devices that the plan does not name may take part, if it names any.
        broker: MQTT broker of the site.
        link: Frame sizes and limits of payload transfers.
        readings: Storage of device reports.
        trainer: Processor that the server computes on.
        tops: Limits of `edge-server serve-tops`.
        threads: Torch threads; 0 for torch's default.
        models: Older name of `trainer.plugins`; both are read.
        log_level: debug, info, warning or error.
        peer: Other sites of a plan with several sites; ignored with one site.
    """

    plan: str = ""
    run: str = ""
    data_dir: str = "runs"
    data_root: str = "../shared/data"
    site: str = ""
    gateway: str = ""
    strangers: bool = False
    broker: Broker = Broker()
    link: LinkConfig = LinkConfig()
    readings: ReadingsConfig = ReadingsConfig()
    trainer: TrainerConfig = TrainerConfig()
    tops: TopsConfig = TopsConfig()
    threads: int = 0
    models: list[str] = []
    log_level: str = "info"
    peer: list[PeerConfig] = []

    def __post_init__(self) -> None:
        """Reject invalid network names and thread counts."""
        require_entries(self.models)
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 (torch's default) to {MAX_THREADS}")


def plugin_entries(config: ServerConfig) -> list[str]:
    """Return the plugins that this server may import."""
    return [*config.trainer.plugins, *config.models]


def load(path: Path) -> ServerConfig:
    """Read `server.toml`.

    Raises:
        ConfigError: As `shared.config.read`, or a name or log level is invalid.
    """
    config = read(path, ServerConfig)
    if not config.site:
        raise ConfigError(f'{path}: site is missing; add the name from the agents\' agent.toml, site = "NAME"')
    check_name(config.site, f"{path}: site")
    _check_peers(config, path)
    if config.run:
        check_name(config.run, f"{path}: run")
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"{path}: log_level: {config.log_level!r}; use debug, info, warning or error")
    optional = [name for name in ("plan", "gateway") if getattr(config, name)]
    paths = ("data_dir", "data_root", *optional)
    places = {name: str(path.parent / getattr(config, name)) for name in paths}
    peers = [_resolve_peer(peer, path.parent) for peer in config.peer]
    return msgspec.structs.replace(
        config, **places, broker=resolve_broker_paths(config.broker, path.parent), peer=peers
    )


def _resolve_peer(peer: PeerConfig, folder: Path) -> PeerConfig:
    """Move the login into the broker's table, and resolve its paths relative to `folder`."""
    broker = peer.broker
    if peer.user:
        broker = msgspec.structs.replace(broker, user=peer.user, password_file=peer.password_file)
    return PeerConfig(site=peer.site, broker=resolve_broker_paths(broker, folder))


def _check_peers(config: ServerConfig, path: Path) -> None:
    """Reject a peer that is this site, or is listed twice."""
    names = [check_name(peer.site, f"{path}: peer.site") for peer in config.peer]
    if config.site in names:
        raise ConfigError(f"{path}: peer.site: {config.site!r} is the name of this site; remove that [[peer]]")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: peer.site: {twice!r} is listed twice; remove one [[peer]]")
