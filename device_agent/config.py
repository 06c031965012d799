"""Configuration of a device agent, read from its TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from device_agent.identity import credentials
from device_agent.identity.credentials import Membership
from shared.config import read
from shared.data.spec import Data, require_source
from shared.errors import ConfigError
from shared.protocol.messages import BLOCK_BYTES
from shared.protocol.topics import check_name
from shared.registry import require_entries
from shared.transfer.frames import FRAME_BYTES, MAX_FRAME_BYTES, MAX_WINDOW, is_frame_size
from shared.transfer.receiver import Policy
from shared.transport.base import Broker, resolve_broker_paths

MAX_MEMORY_MB = 1 << 20
MAX_THREADS = 1024
MAX_PORT, MAX_BATCH = 65535, 65536
MAX_NICE = 19
MAX_CUT_BITS, MAX_CUT_S = 16, 60.0
MIN_PERIOD_S, MAX_PERIOD_S = 0.2, 3600.0
MAX_SAMPLE_HZ, MAX_WATTS = 50.0, 1e5
PROFILE_SUFFIX = ".toml"
"""Suffix of the path of a firmware profile; a name without it is a profile id."""
Provider: TypeAlias = Literal["auto", "cpu", "cuda", "tensorrt"]
"""Execution providers for served models."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training process.

    Attributes:
        idle_s: Seconds without a task after which the process ends.
        memory_mb: Memory limit in MiB; 0 for four fifths of the board's memory.
        threads: Threads of torch; 0 to choose the fastest by timing a few steps of each network.
        trains: Whether this board receives training tasks; `false` for one without enough memory: it evaluates rounds
            of plans with `evaluation.runtime = "onnx"`, like a board without torch.
        device: Device of torch: `cpu`, `cuda` for the board's GPU, or `auto` for the GPU if torch can use one. Files
            and examples stay in CPU memory; each batch is moved to the GPU. Default: `auto` on a Jetson, else `cpu`, by
            the firmware profile.
        nice: Nice value, 0 to 19. Default: the firmware profile's if this board also serves models, else 0.
        cpus: Numbers of the CPUs it may run on, empty for all. Default: if this board also serves models, all but those
            that the profile reserves, else all.
        python: Interpreter, if not the agent's own, such as `/usr/bin/python3.10`, for which a vendor builds PyTorch.
            Default: the one for which `device-agent setup train` installed PyTorch, or else the agent's own.
        plugins: Networks, algorithms, codecs, losses, metrics and sources from outside that tasks and `[data]` may
            name: `module:attribute`, `distribution:name` for an entry point, or `module:*` for all that a module
            defines.
        models: Older name of `plugins`; both are read.
        projects: Projects of this site, by name, whose code this board may install and run in its trainer: signed by
            the site, into a folder below `state_dir`. Without an entry, nothing is ever installed.
    """

    idle_s: float = 300.0
    memory_mb: int = 0
    threads: int = 0
    trains: bool = True
    device: Literal["auto", "cpu", "cuda"] | None = None
    nice: int | None = None
    cpus: list[int] | None = None
    python: str = ""
    plugins: list[str] = []
    models: list[str] = []
    projects: list[str] = []

    def __post_init__(self) -> None:
        """Reject limits that a process cannot have."""
        require_entries(self.plugins, "plugins")
        require_entries(self.models)
        if not self.idle_s >= 0:
            raise ValueError(f"idle_s must be 0 or more seconds, not {self.idle_s}")
        if not 0 <= self.memory_mb <= MAX_MEMORY_MB or not 0 <= self.threads <= MAX_THREADS:
            most = f"{MAX_MEMORY_MB} and {MAX_THREADS}"
            raise ValueError(f"memory_mb and threads must be 0 (automatic) up to {most}")
        if self.nice is not None and not 0 <= self.nice <= MAX_NICE:
            raise ValueError(f"nice must be 0 to {MAX_NICE}, not {self.nice}")
        cpus = self.cpus or []
        if len(set(cpus)) < len(cpus) or not all(0 <= cpu < MAX_THREADS for cpu in cpus):
            raise ValueError(f"cpus must be distinct CPU numbers from 0, not {cpus}")

    @property
    def plugin_entries(self) -> list[str]:
        """The plugins that the trainer may import."""
        return [*self.plugins, *self.models]


class CutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Split serving: the upper half of a network runs on the server, with `[serve] split = "cut"`.

    Attributes:
        codec: Encoding of features: `dense` unchanged, `float16` in half the bytes, `quantize` with `bits` per
            magnitude.
        bits: Bits per magnitude of `quantize`, 1 to 16.
        deadline_s: Seconds that a request waits for the server.
        whole: Whether the whole network is loaded too and answers while the server is unavailable.
    """

    codec: Literal["dense", "float16", "quantize"] = "dense"
    bits: int = 8
    deadline_s: float = 2.0
    whole: bool = False

    def __post_init__(self) -> None:
        """Reject values outside the protocol's limits."""
        if not 1 <= self.bits <= MAX_CUT_BITS or not 0 < self.deadline_s <= MAX_CUT_S:
            raise ValueError(f"bits must be 1 to {MAX_CUT_BITS}, deadline_s above 0 up to {MAX_CUT_S:g}")


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that serves models to applications on this board, by the Open Inference Protocol.

    Attributes:
        releases: Folders written by `edge-server release export`; each release is served.
        port: Port on 127.0.0.1; 0 for none.
        socket: Path of the Unix socket, served as well; empty for `serve.sock` in the agent's `state_dir`.
        provider: Execution provider: `cpu`, `cuda` or `tensorrt` if this build of ONNX Runtime has it; otherwise the
            CPU, with a log message. `auto` times each model on GPU and CPU when it is opened and uses the faster.
            Default: `auto` on a Jetson, else `cpu`, by the firmware profile.
        threads: ONNX Runtime threads of one request; one avoids spinning and handovers. Default: the firmware profile's
            value, usually 1.
        rate_hz: Expected requests a second, roughly. From 30 on, waiting threads spin before they sleep, for 50 us or
            the time in the firmware profile, unless the board runs on a battery.
        memory_mb: Memory limit in MiB; 0 for two fifths of the board's memory.
        arena: Whether ONNX Runtime retains the memory of a request for the next: `on`, `off`, or `auto`: on if the
            board has 1 GiB or more, unless the firmware profile differs.
        max_body_mb: Largest request, in MiB.
        max_batch: Most examples in a request.
        patience_s: Time limit in seconds for receiving a request.
        own_max_drop: Largest accuracy drop of a personal model against the release, on the examples set aside by
            `data.holdout`; beyond it the release is served. 1 disables the comparison.
        split: `cut` to run only the lower half of releases that have halves, with the upper half on the server's
            `edge-server serve-tops`; empty to run whole networks.
        cut: Settings of the requests to the server.
    """

    releases: list[str] = []
    port: int = 8471
    socket: str = ""
    provider: Provider | None = None
    threads: int | None = None
    rate_hz: float = 0.0
    memory_mb: int = 0
    arena: Literal["auto", "on", "off"] = "auto"
    max_body_mb: int = 16
    max_batch: int = 64
    patience_s: float = 10.0
    own_max_drop: float = 0.02
    split: Literal["", "cut"] = ""
    cut: CutConfig = CutConfig()

    def __post_init__(self) -> None:
        """Reject values that a process cannot have."""
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port must be 0 (none) to {MAX_PORT}, not {self.port}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS}, not {self.threads}")
        if not 0 <= self.memory_mb <= MAX_MEMORY_MB or not 1 <= self.max_body_mb <= MAX_MEMORY_MB:
            raise ValueError(
                f"memory_mb must be 0 (automatic) or more, max_body_mb 1 or more, both up to {MAX_MEMORY_MB}"
            )
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise ValueError(f"max_batch must be 1 to {MAX_BATCH}, not {self.max_batch}")
        if not self.rate_hz >= 0 or not 0 < self.patience_s <= MAX_PERIOD_S:
            raise ValueError(f"rate_hz must be 0 or more, patience_s above 0 up to {MAX_PERIOD_S:g}")
        if not 0 <= self.own_max_drop <= 1:
            raise ValueError(f"own_max_drop must be a share from 0 to 1, not {self.own_max_drop}")


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfer of payloads.

    Attributes:
        frame_bytes: Payload bytes of one MQTT message; smaller if the broker or a slow link requires it.
        window: Frames in flight at once.
        patience_s: Seconds without a frame after which frames are requested again.
        max_payload_mb: Largest payload accepted, in MiB.
    """

    frame_bytes: int = FRAME_BYTES
    window: int = 16
    patience_s: float = 2.0
    max_payload_mb: int = 2048

    def __post_init__(self) -> None:
        """Reject values outside the protocol's limits."""
        if not is_frame_size(self.frame_bytes) or not 1 <= self.window <= MAX_WINDOW:
            sizes = f"{BLOCK_BYTES} to {MAX_FRAME_BYTES} in steps of {BLOCK_BYTES}"
            raise ValueError(f"frame_bytes must be {sizes}, window 1 to {MAX_WINDOW}")
        if not self.patience_s > 0 or self.max_payload_mb < 1:
            raise ValueError("patience_s must be above zero, max_payload_mb 1 or more")

    @property
    def policy(self) -> Policy:
        """Limits for receiving payloads."""
        return Policy(self.window, self.patience_s, self.max_payload_mb << 20, frame_bytes=self.frame_bytes)


class MeterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A power meter of this board alone: a smart plug on the network, or a chip on the board's own I2C bus.

    Attributes:
        kind: A Shelly of Gen2 or newer by its component (`shelly` for a switch, `shelly-pm1`, `shelly-em1`, `shelly-em`
            for all three phases), one of Gen1 (`shelly1`, `shelly1-em`), `tasmota`, or `chip`.
        url: Address, such as `http://192.0.2.7`; empty for a chip.
        chip: Name of the chip or of its channel: NAME of `power.NAME_watts` as `device-agent probe` prints it.
        user: User name, if the meter requires a password.
        password_file: File with the password on one line; empty for none.
        period_s: Time between reads in seconds.
    """

    kind: Literal["shelly", "shelly-pm1", "shelly-em1", "shelly-em", "shelly1", "shelly1-em", "tasmota", "chip"]
    url: str = ""
    chip: str = ""
    user: str = "admin"
    password_file: str = ""
    period_s: float = 1.0

    def __post_init__(self) -> None:
        """Reject an invalid address or period."""
        if self.kind == "chip":
            if self.url or not self.chip:
                raise ValueError(
                    "a meter of kind chip takes no url; set `chip` to a name that `device-agent probe` prints"
                )
        elif self.chip:
            raise ValueError(f"a meter of kind {self.kind} takes no chip; remove it")
        elif not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url[:60]!r}")
        if not MIN_PERIOD_S <= self.period_s <= MAX_PERIOD_S:
            raise ValueError(f"period_s must be {MIN_PERIOD_S} to {MAX_PERIOD_S:g} seconds, not {self.period_s}")


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clocks and power mode while the agent runs, restored afterwards; empty and 0 change nothing.

    Attributes:
        power_mode: Name of a power mode (Jetson).
        governor: Governor of all CPU frequency policies.
        max_hertz: Highest clock of all CPU frequency policies.
    """

    power_mode: str = ""
    governor: str = ""
    max_hertz: float = 0.0


class EmulatedPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Emulated power of a board, for several agents that share a machine, whose meters cannot tell them apart.

    A task costs idle_w joules a second plus busy_w joules per CPU second of its process; these figures are `modelled`.

    Attributes:
        idle_w: Idle power in watts.
        busy_w: Additional watts for each busy core of the trainer.
        tx_w: Additional watts while uploading; absent: the cost of uploads is unknown.
        rx_w: Additional watts while downloading; absent: the cost of downloads is unknown.
    """

    idle_w: float = 0.0
    busy_w: float = 0.0
    tx_w: float | None = None
    rx_w: float | None = None

    def __post_init__(self) -> None:
        """Reject implausible powers."""
        for name in self.__struct_fields__:
            if not 0 <= (getattr(self, name) or 0.0) <= MAX_WATTS:
                raise ValueError(f"{name} must be 0 to {MAX_WATTS:g} watts, not {getattr(self, name)}")


class BoardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurement of the board.

    Attributes:
        profile: Id of a firmware profile, the path of a TOML file that contains one, or `auto`.
        root: Root of the board's files; a folder other than `/` is a recorded board.
        sample_hz: Power samples a second during a task; 0 for the profile's value.
        meter: External power meter; if set, it is the source of power.
        target: Clocks and power mode to run with.
        emulated: Power model of an emulated board, used in place of the machine's sensors.
    """

    profile: str = "auto"
    root: str = "/"
    sample_hz: float = 0.0
    meter: MeterConfig | None = None
    target: TargetConfig = TargetConfig()
    emulated: EmulatedPower | None = None

    def __post_init__(self) -> None:
        """Reject a rate whose cost exceeds its use."""
        if not 0 <= self.sample_hz <= MAX_SAMPLE_HZ:
            raise ValueError(f"sample_hz must be 0 to {MAX_SAMPLE_HZ:g}, not {self.sample_hz}")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. Relative paths are relative to the folder of this file.

    On a board that has joined a site (`device-agent join`), `device`, `site` and `[broker]` may be left out.

    Attributes:
        device: Device id, unique within the site.
        site: Site of the edge server.
        state_dir: Folder that survives reboots: outbox, device state, spooled payloads.
        data: The device's own examples; optional for a board that only serves models.
        broker: The site's MQTT broker.
        trainer: Settings of the training process.
        link: Settings of payload transfers.
        board: Measurement of the board.
        serve: Serving of models to applications on this board; absent for a board that only trains.
        outbox_mb: Disk limit in MiB of updates waiting for the server; a task whose update would not fit fails.
        report_s: Interval of reports in seconds.
        log_level: debug, info, warning or error.
    """

    device: str = ""
    state_dir: str
    data: Data | None = None
    site: str = ""
    broker: Broker = Broker()
    trainer: TrainerConfig = TrainerConfig()
    link: LinkConfig = LinkConfig()
    board: BoardConfig = BoardConfig()
    serve: ServeConfig | None = None
    outbox_mb: int = 4096
    report_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Reject an invalid interval, an empty outbox, and a board without any purpose."""
        if not self.report_s > 0:
            raise ValueError(f"report_s must be above zero, not {self.report_s}")
        if self.outbox_mb < 1:
            raise ValueError(f"outbox_mb must be 1 or more, not {self.outbox_mb}")
        if self.data is None and self.serve is None:
            raise ValueError("a board without [data] (its training examples) needs [serve]")

    @property
    def examples(self) -> Data:
        """The device's examples.

        Raises:
            ConfigError: The board only serves models.
        """
        if self.data is None:
            raise ConfigError("[data] is missing; add it to name the training examples")
        return self.data


def load(path: Path) -> AgentConfig:
    """Load an agent's file, completed by the board's site membership.

    Raises:
        ConfigError: As `load_file`; or `device` or `site` is missing or contradicts the membership.
    """
    config = load_file(path)
    folder = Path(config.state_dir) / credentials.FOLDER / credentials.CURRENT
    if membership := credentials.read_membership(folder):
        config = _apply_membership(config, path, folder, membership)
    for key in ("device", "site"):
        if not getattr(config, key):
            raise ConfigError(f'{path}: {key} is missing; add {key} = "NAME", or join a site with `device-agent join`')
    return config


def load_file(path: Path) -> AgentConfig:
    """Load an agent's file alone; `device` and `site` may be missing.

    Raises:
        ConfigError: As `shared.config.read`; or a name or level is invalid.
    """
    config = _resolve_paths(read(path, AgentConfig), path.parent)
    if config.device:
        check_name(config.device, f"{path}: device")
    if config.site:
        check_name(config.site, f"{path}: site")
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"{path}: log_level: {config.log_level!r}; use debug, info, warning or error")
    if config.data:
        require_source(config.data, str(path))
    return config


def _apply_membership(config: AgentConfig, path: Path, folder: Path, membership: Membership) -> AgentConfig:
    """Complete the configuration by the membership, where the file leaves settings out."""
    joined = f"this board joined site {membership.site} as {membership.device}"
    if config.device not in ("", membership.device):
        raise ConfigError(f"{path}: device is {config.device!r}, but {joined}; remove `device` or join again")
    if config.site not in ("", membership.site):
        raise ConfigError(f"{path}: site is {config.site!r}, but {joined}; remove `site` or join again")
    default = Broker()
    is_configured = (config.broker.host, config.broker.port, config.broker.tls) != (
        default.host,
        default.port,
        default.tls,
    )
    broker = config.broker if is_configured else credentials.make_broker(folder, membership, config.broker)
    return msgspec.structs.replace(config, device=membership.device, site=membership.site, broker=broker)


def _resolve_paths(config: AgentConfig, folder: Path) -> AgentConfig:
    """Make the paths of a configuration relative to its file's folder."""
    replace, data, board = msgspec.structs.replace, config.data, config.board
    if data and data.path:
        data = replace(data, path=str(folder / data.path))
    serve = config.serve
    if serve:
        socket = str(folder / serve.socket) if serve.socket else ""
        serve = replace(serve, releases=[str(folder / release) for release in serve.releases], socket=socket)
    profile = str(folder / board.profile) if board.profile.endswith(PROFILE_SUFFIX) else board.profile
    board = replace(board, root=str(folder / board.root), profile=profile)
    if board.meter and board.meter.password_file:
        password_file = str(folder / board.meter.password_file)
        board = replace(board, meter=replace(board.meter, password_file=password_file))
    broker, state_dir = resolve_broker_paths(config.broker, folder), str(folder / config.state_dir)
    return replace(config, state_dir=state_dir, broker=broker, data=data, board=board, serve=serve)
