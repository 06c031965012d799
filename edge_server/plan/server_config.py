"""What an edge server is told by its file."""

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
    """How payloads travel.

    Attributes:
        frame_bytes: Payload bytes in one MQTT message, less where the broker or a slow link bears less.
        window: Frames of one device under way to the server at once.
        budget: Frames of all devices together under way to the server at once; bounds its memory.
        patience_s: Seconds without a frame after which frames are asked for again, and seconds that one device may
            keep the others waiting on the shared topic before it is served alone.
        max_features_mb: MiB of one step's features that are taken of a device; they are held in memory.
        kept_gradients_mb: MiB of gradients of one split round that are kept until it ends, of all devices together: a
            device whose trainer was killed does its steps again by them. Those behind it misses. The first 16 MiB are
            in memory, others in a file of the run's folder.
    """

    frame_bytes: int = FRAME_BYTES
    window: int = 16
    budget: int = 48
    patience_s: float = 1.0
    max_features_mb: int = 64
    kept_gradients_mb: int = 256

    def __post_init__(self) -> None:
        """Refuse what the protocol cannot carry."""
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
        """Return how payloads of at most `limit` bytes are received."""
        return Policy(self.window, self.patience_s, limit, frame_bytes=self.frame_bytes, budget=self.budget)


class ReadingsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of what the devices report is kept, in `data_dir/readings.sqlite`.

    Attributes:
        keep_days: Reports older than that are forgotten; 0 keeps none at all.
        max_mb: MiB of the file; beyond it the device that takes most of it loses its oldest reports first.
    """

    keep_days: float = 14.0
    max_mb: int = 256

    def __post_init__(self) -> None:
        """Refuse what no disk can mean."""
        if not 0 <= self.keep_days <= MAX_KEEP_DAYS or not 1 <= self.max_mb <= MAX_KEEP_MB:
            raise ValueError(f"keep_days must be 0 to {MAX_KEEP_DAYS}, max_mb 1 to {MAX_KEEP_MB}")


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server computes: evaluation, its part of a split network, and its own training.

    Attributes:
        device: `cpu`, `cuda` for a GPU, or `auto` for the GPU where torch reaches one. Aggregates stay on the CPU.
    """

    device: Literal["auto", "cpu", "cuda"] = "cpu"


class TopsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `edge-server serve-tops` may take: upper halves of releases, run on features that devices send.

    Attributes:
        threads: Of ONNX Runtime, for one request; it works on one at a time.
        max_features_mb: MiB of the features of one request, as they travel and as float32 numbers.
        held_mb: MiB of the features of all devices' requests together, which are held in memory.
        waiting: Requests of all devices that are here at once; a device has one.
        releases: Upper halves that stay open; the one that was asked longest ago makes way.
    """

    threads: int = 1
    max_features_mb: int = 16
    held_mb: int = 256
    waiting: int = 64
    releases: int = 4

    def __post_init__(self) -> None:
        """Refuse what serves nobody, and what ONNX Runtime cannot be told."""
        if not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS}")
        if not 1 <= self.max_features_mb <= min(self.held_mb, MAX_FEATURES_MB) or self.held_mb > MAX_KEPT_MB:
            raise ValueError(f"max_features_mb must be 1 to {MAX_FEATURES_MB}, held_mb as many at least")
        if not 1 <= self.waiting <= MAX_WAITING or not 1 <= self.releases <= MAX_OPEN:
            raise ValueError(f"waiting must be 1 to {MAX_WAITING}, releases 1 to {MAX_OPEN}")


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another site of the same run, to whose broker this server dials out.

    Attributes:
        site: Its name, as the plan's `[sites] clusters` has it.
        broker: Its broker, as seen from here, and by what it knows us.
        user: As `broker.user`, of files of versions before.
        password_file: As `broker.password_file`, of files of versions before.
    """

    site: str
    broker: Broker = Broker()
    user: str = ""
    password_file: str = ""

    def __post_init__(self) -> None:
        """Refuse a password of nobody, and two logins."""
        if self.password_file and not self.user:
            raise ValueError("password_file stands without user: add who it is the password of")
        if self.user and self.broker.user:
            raise ValueError("user stands here and in [peer.broker]: keep the one there")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One site. Relative paths are taken from the folder of its file.

    Attributes:
        plan: The trial plan to run.
        run: Name of the run; empty to go on with an unfinished run of the same plan, else to begin a new one.
        data_dir: Folder of the site's runs.
        data_root: Folder that relative data paths of plans start from.
        site: The site's name, as the agents' files have it; a file must state it.
        gateway: Folder of the site, as `edge-server site init` makes it: who is revoked there takes no part from that
            moment on. Empty where there is none.
        strangers: Whether devices take part that the plan does not name, where it names any.
        broker: The site's MQTT broker.
        link: How payloads are sent and received.
        readings: How long device reports are kept.
        trainer: Where the server computes.
        tops: Limits of `edge-server serve-tops`.
        threads: Torch threads; 0 for torch's own choice.
        models: Networks of the user's own that plans may name: `module:function`, or `module:*` for all that a module
            defines; with those of FIELDFLEET_MODELS.
        log_level: debug, info, warning or error.
        peer: The other sites of a plan that has several; a plan with one site has no use for them.
    """

    plan: str
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
        """Refuse what torch cannot be told, and what is no network's name."""
        require_entries(self.models)
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0, for torch's own choice, to {MAX_THREADS}")


def load(path: Path) -> ServerConfig:
    """Read a server's file.

    Raises:
        ConfigError: As `shared.config.read`, or a name or level cannot be used.
    """
    config = read(path, ServerConfig)
    if not config.site:
        raise ConfigError(f'{path}: site is missing; add the name that the agents\' agent.toml have, site = "NAME"')
    check_name(config.site, f"{path}: site")
    _check_peers(config, path)
    if config.run:
        check_name(config.run, f"{path}: run")
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"{path}: log_level: {config.log_level!r}; use debug, info, warning or error")
    paths = ("plan", "data_dir", "data_root", *(["gateway"] if config.gateway else []))
    places = {name: str(path.parent / getattr(config, name)) for name in paths}
    peers = [_resolve_peer(peer, path.parent) for peer in config.peer]
    return msgspec.structs.replace(
        config, **places, broker=resolve_broker_paths(config.broker, path.parent), peer=peers
    )


def _resolve_peer(peer: PeerConfig, folder: Path) -> PeerConfig:
    """Return a peer with its login in its broker, and paths taken from the folder of its file."""
    broker = peer.broker
    if peer.user:
        broker = msgspec.structs.replace(broker, user=peer.user, password_file=peer.password_file)
    return PeerConfig(site=peer.site, broker=resolve_broker_paths(broker, folder))


def _check_peers(config: ServerConfig, path: Path) -> None:
    """Refuse peers that are no other sites."""
    names = [check_name(peer.site, f"{path}: peer.site") for peer in config.peer]
    if config.site in names:
        raise ConfigError(f"{path}: peer.site: {config.site!r} is this very site; take that [[peer]] out")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: peer.site: {twice!r} stands there twice; take one [[peer]] out")
