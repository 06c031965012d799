"""Configuration of a device agent, read from its TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from device_agent.identity import credentials
from device_agent.identity.credentials import Membership
from shared.config import read
from shared.data.spec import Data
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
"""Of the path of a firmware profile; without it a profile is named by its id."""
Provider: TypeAlias = Literal["auto", "cpu", "cuda", "tensorrt"]
"""Choices of what computes a served model."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that trains.

    Attributes:
        idle_s: Seconds without a task after which it is ended.
        memory_mb: Most memory it may take, in MiB; 0 for four fifths of the board's.
        threads: Threads of torch; 0 for as many as are fastest, found by timing a few steps of each network.
        trains: Whether this board is given tasks that train; `false` for one that has no room for that: it evaluates
            rounds of plans with `evaluation.runtime = "onnx"`, as a board without torch does.
        device: What it computes with: `cpu`, `cuda` for the board's GPU, or `auto` for the GPU where torch reaches one.
            Files and examples stay in the CPU's memory; a batch is on the GPU while it is trained on. Left out: `auto`
            on a Jetson, else `cpu`, by the firmware profile.
        nice: Its nice value, 0 to 19; left out: what the firmware profile says where this board serves models too,
            else 0.
        cpus: Numbers of the CPUs that it may run on, empty for all; left out: where this board serves models too all
            but those that the profile spares, else all.
        python: The Python that it runs on, where that is not the agent's, such as `/usr/bin/python3.10`, for which a
            vendor builds PyTorch. Left out: the one that `device-agent setup train` brought PyTorch for, or else the
            agent's own.
        models: Networks of the user's own that it may import when a task names them: `module:function`, or `module:*`
            for all that a module defines.
    """

    idle_s: float = 300.0
    memory_mb: int = 0
    threads: int = 0
    trains: bool = True
    device: Literal["auto", "cpu", "cuda"] | None = None
    nice: int | None = None
    cpus: list[int] | None = None
    python: str = ""
    models: list[str] = []

    def __post_init__(self) -> None:
        """Refuse limits that no process can be given."""
        require_entries(self.models)
        if not self.idle_s >= 0:
            raise ValueError(f"idle_s must be 0 or more seconds, not {self.idle_s}")
        if not 0 <= self.memory_mb <= MAX_MEMORY_MB or not 0 <= self.threads <= MAX_THREADS:
            most = f"{MAX_MEMORY_MB} and {MAX_THREADS}"
            raise ValueError(f"memory_mb and threads must be 0, for the usual, or more, up to {most}")
        if self.nice is not None and not 0 <= self.nice <= MAX_NICE:
            raise ValueError(f"nice must be 0 to {MAX_NICE}, not {self.nice}")
        cpus = self.cpus or []
        if len(set(cpus)) < len(cpus) or not all(0 <= cpu < MAX_THREADS for cpu in cpus):
            raise ValueError(f"cpus must be different numbers of CPUs, from 0, not {cpus}")


class CutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the upper half of a network is asked of the server, where `[serve] split = "cut"`.

    Attributes:
        codec: How features travel: `dense` as they are, `float16` in half the bytes, `quantize` by `bits` a magnitude.
        bits: Of a magnitude, 1 to 16, by `quantize`.
        deadline_s: Seconds that a request waits for the server.
        whole: Whether the whole network is loaded too, and answers where the server cannot be had.
    """

    codec: Literal["dense", "float16", "quantize"] = "dense"
    bits: int = 8
    deadline_s: float = 2.0
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuse what no request can travel by."""
        if not 1 <= self.bits <= MAX_CUT_BITS or not 0 < self.deadline_s <= MAX_CUT_S:
            raise ValueError(f"bits must be 1 to {MAX_CUT_BITS}, deadline_s above 0 up to {MAX_CUT_S:g}")


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that serves models to applications on this board, by the Open Inference Protocol.

    Attributes:
        releases: Folders as `edge-server release export` writes them, of which each is served.
        port: Of 127.0.0.1 on which it answers; 0 for none.
        socket: Path of the Unix socket on which it answers too; empty for `serve.sock` in the agent's `state_dir`.
        provider: What computes: `cpu`, `cuda` or `tensorrt`, where this build of ONNX Runtime has it; else the CPU, and
            the log says so. `auto` times each model on GPU and CPU when it is opened, and takes the faster. Left out:
            `auto` on a Jetson, else `cpu`, by the firmware profile.
        threads: Of ONNX Runtime for one request; with one nothing spins or is handed over. Left out: what the firmware
            profile says, which is one unless it knows better.
        rate_hz: About how many requests a second there will be. From 30 on, threads that wait for work spin for 50 us
            before they sleep, or as long as the firmware profile says, unless the board runs on a battery.
        memory_mb: Most memory it may take, in MiB; 0 for two fifths of the board's.
        arena: Whether ONNX Runtime keeps the memory of one request for the next: `on`, `off`, or `auto` for on where
            the board has 1 GiB or more, unless the firmware profile says otherwise.
        max_body_mb: Largest request, in MiB.
        max_batch: Most examples in a request.
        patience_s: Seconds in which a request must have come whole.
        own_max_drop: By how much a model of the device's own may be less accurate than the release on the examples
            that `data.holdout` sets aside; else the release answers. 1 to compare nothing.
        split: `cut` to run the lower half alone of releases that have halves, and to ask the server's
            `edge-server serve-tops` for the rest; empty to run whole networks.
        cut: How that is asked.
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
        """Refuse what no process can be given."""
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port must be 0, for none, to {MAX_PORT}, not {self.port}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS}, not {self.threads}")
        if not 0 <= self.memory_mb <= MAX_MEMORY_MB or not 1 <= self.max_body_mb <= MAX_MEMORY_MB:
            raise ValueError(f"memory_mb must be 0, for the usual, max_body_mb 1 or more, both up to {MAX_MEMORY_MB}")
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise ValueError(f"max_batch must be 1 to {MAX_BATCH}, not {self.max_batch}")
        if not self.rate_hz >= 0 or not 0 < self.patience_s <= MAX_PERIOD_S:
            raise ValueError(f"rate_hz must be 0 or more, patience_s above 0 up to {MAX_PERIOD_S:g}")
        if not 0 <= self.own_max_drop <= 1:
            raise ValueError(f"own_max_drop must be a share from 0 to 1, not {self.own_max_drop}")


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

    @property
    def policy(self) -> Policy:
        """How payloads are received."""
        return Policy(self.window, self.patience_s, self.max_payload_mb << 20, frame_bytes=self.frame_bytes)


class MeterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A power meter that feeds this board alone: a smart plug on the network, or a chip on the board's own I2C bus.

    Attributes:
        kind: A Shelly of Gen2 or newer by its component (`shelly` for a switch, `shelly-pm1`, `shelly-em1`, `shelly-em`
            for all three phases), one of Gen1 (`shelly1`, `shelly1-em`), `tasmota`, or `chip`.
        url: Where it answers, such as `http://192.0.2.7`; empty for a chip.
        chip: Name of the chip or of its channel: NAME of `power.NAME_watts` as `device-agent probe` prints it.
        user: Who asks, where the meter wants a password.
        password_file: Holds the password on one line; empty for none.
        period_s: Seconds between reads.
    """

    kind: Literal["shelly", "shelly-pm1", "shelly-em1", "shelly-em", "shelly1", "shelly1-em", "tasmota", "chip"]
    url: str = ""
    chip: str = ""
    user: str = "admin"
    password_file: str = ""
    period_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an invalid address or period."""
        if self.kind == "chip":
            if self.url or not self.chip:
                raise ValueError("a meter of kind chip has no url, but the `chip` that `device-agent probe` names")
        elif self.chip:
            raise ValueError(f"a meter of kind {self.kind} has no chip; leave it out")
        elif not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url[:60]!r}")
        if not MIN_PERIOD_S <= self.period_s <= MAX_PERIOD_S:
            raise ValueError(f"period_s must be {MIN_PERIOD_S} to {MAX_PERIOD_S:g} seconds, not {self.period_s}")


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clocks and power mode while the agent runs, restored when it ends; empty and 0 leave things alone.

    Attributes:
        power_mode: Name of a power mode (Jetson).
        governor: Of all CPU frequency policies.
        max_hertz: Highest clock of all CPU frequency policies.
    """

    power_mode: str = ""
    governor: str = ""
    max_hertz: float = 0.0


class EmulatedPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Power of the board that an agent stands for where several share a machine, whose meters cannot tell them apart.

    A block takes idle_w joules a second and busy_w a CPU second of its own process; all such figures are `modelled`.

    Attributes:
        idle_w: Watts all the while.
        busy_w: Watts besides for every busy core of the trainer's.
        tx_w: Watts besides while it uploads; absent: what an upload takes is unknown.
        rx_w: Watts besides while it downloads; likewise.
    """

    idle_w: float = 0.0
    busy_w: float = 0.0
    tx_w: float | None = None
    rx_w: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no board draws."""
        for name in self.__struct_fields__:
            if not 0 <= (getattr(self, name) or 0.0) <= MAX_WATTS:
                raise ValueError(f"{name} must be 0 to {MAX_WATTS:g} watts, not {getattr(self, name)}")


class BoardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the board is measured.

    Attributes:
        profile: Id of a firmware profile, the path of a TOML file that holds one, or `auto`.
        root: Where the board's files lie; another folder than `/` is a recorded board.
        sample_hz: Power samples a second while a task is under way; 0 for what the profile says.
        meter: A power meter, if there is one; then it is the source of power.
        target: Clocks and power mode to run with.
        emulated: Power of a board that this agent stands for, in place of whatever the machine's sensors tell.
    """

    profile: str = "auto"
    root: str = "/"
    sample_hz: float = 0.0
    meter: MeterConfig | None = None
    target: TargetConfig = TargetConfig()
    emulated: EmulatedPower | None = None

    def __post_init__(self) -> None:
        """Refuse a rate that costs more than it tells."""
        if not 0 <= self.sample_hz <= MAX_SAMPLE_HZ:
            raise ValueError(f"sample_hz must be 0 to {MAX_SAMPLE_HZ:g}, not {self.sample_hz}")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. Relative paths are taken from the folder of its file.

    On a board that has joined a site (`device-agent join`), `device`, `site` and `[broker]` may be left out.

    Attributes:
        device: Its id, unique within the site.
        site: The site its edge server serves.
        state_dir: Folder that survives reboots: outbox, device state, spooled payloads.
        data: Its own examples; a board that only serves models may have none.
        broker: The site's MQTT broker.
        trainer: The process that trains.
        link: How payloads are sent and received.
        board: How the board is measured.
        serve: Serves models to applications on this board; absent for a board that only trains.
        outbox_mb: Most that updates waiting for the server may take on the disk, in MiB; where the next one would
            not fit, its task fails.
        report_s: Seconds between reports.
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
        """Refuse an invalid period, and an outbox that holds nothing."""
        if not self.report_s > 0:
            raise ValueError(f"report_s must be above zero, not {self.report_s}")
        if self.outbox_mb < 1:
            raise ValueError(f"outbox_mb must be 1 or more, not {self.outbox_mb}")
        if self.data is None and self.serve is None:
            raise ValueError("[data] says what the device trains with; without it a board needs [serve]")

    @property
    def examples(self) -> Data:
        """What the device trains with.

        Raises:
            ConfigError: It only serves models.
        """
        if self.data is None:
            raise ConfigError("[data] is missing: it says what the device trains with")
        return self.data


def load(path: Path) -> AgentConfig:
    """Load an agent's file, with what the board was told when it joined a site.

    Raises:
        ConfigError: As `load_file`, `device` or `site` is missing, or the board joined under another name or site.
    """
    config = load_file(path)
    folder = Path(config.state_dir) / credentials.FOLDER / credentials.CURRENT
    if membership := credentials.read_membership(folder):
        config = _joined(config, path, folder, membership)
    for key in ("device", "site"):
        if not getattr(config, key):
            raise ConfigError(f'{path}: {key} is missing; add {key} = "NAME", or join a site by `device-agent join`')
    return config


def load_file(path: Path) -> AgentConfig:
    """Load an agent's file alone; `device` and `site` may be missing.

    Raises:
        ConfigError: As `shared.config.read`, or a name or level cannot be used.
    """
    config = _placed(read(path, AgentConfig), path.parent)
    if config.device:
        check_name(config.device, f"{path}: device")
    if config.site:
        check_name(config.site, f"{path}: site")
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"{path}: log_level: {config.log_level!r}; use debug, info, warning or error")
    return config


def _joined(config: AgentConfig, path: Path, folder: Path, membership: Membership) -> AgentConfig:
    """Return a file's settings with those of the site in the place of what it leaves out."""
    joined = f"this board joined site {membership.site} as {membership.device}"
    if config.device not in ("", membership.device):
        raise ConfigError(f"{path}: device is {config.device!r}, and {joined}: take `device` out, or join anew")
    if config.site not in ("", membership.site):
        raise ConfigError(f"{path}: site is {config.site!r}, and {joined}: take `site` out, or join anew")
    usual = Broker()
    is_told = (config.broker.host, config.broker.port, config.broker.tls) != (usual.host, usual.port, usual.tls)
    broker = config.broker if is_told else credentials.broker_of(folder, membership, config.broker)
    return msgspec.structs.replace(config, device=membership.device, site=membership.site, broker=broker)


def _placed(config: AgentConfig, folder: Path) -> AgentConfig:
    """Return an agent's file with the paths in it taken from its own folder."""
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
