"""Schema of a firmware profile, a TOML file per board; see firmware_profiles/README.md."""

from __future__ import annotations

from typing import Literal

import msgspec

FALLBACK = "generic-"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a profile; unknown keys are errors."""


class Match(Struct, frozen=True, kw_only=True):
    """Boards that a profile applies to: those with any of these tokens. The matching profile of highest priority wins.

    Attributes:
        compatible: Exact tokens of /proc/device-tree/compatible. Never the model string, which is often wrong.
        dmi: `sys_vendor`, `product_name` or `board_name` of a PC, exact.
        machine: Output of `uname -m`, for fallback profiles: `aarch64`, `armv7l`, `x86_64`.
    """

    compatible: tuple[str, ...] = ()
    dmi: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    priority: int = 0


class Policy(Struct, frozen=True, kw_only=True):
    """CPUs that share a clock, by their first number; `name` is the cluster's, for display."""

    first_cpu: int
    name: str = ""
    max_hertz: float = 0.0


class Cpu(Struct, frozen=True, kw_only=True):
    """Clocks of a board.

    Attributes:
        sources: Clock sources, best first: `firmware` (a Raspberry Pi's firmware, whose clock sysfs may not show),
            `cpufreq`, `cpuinfo`.
        driver_clock: Quality of the clock that cpufreq reports: `measured` if a counting loop confirmed it on such a
            board, else `modelled`; a clock counted by the cores themselves is always measured.
        nominal_hertz: Clock if no source answers.
        policies: In the order of sysfs.
        low_opp_correction: Ratio of measured to reported clock below `low_opp_hertz` (1 for none).
        isa: Token of /proc/cpuinfo that a library needs to not die of SIGILL, by library.
    """

    sources: tuple[Literal["firmware", "cpufreq", "cpuinfo"], ...] = ("cpufreq", "cpuinfo")
    driver_clock: Literal["measured", "modelled"] = "measured"
    nominal_hertz: float = 0.0
    policies: tuple[Policy, ...] = ()
    low_opp_correction: float = 1.0
    low_opp_hertz: float = 0.0
    isa: dict[str, str] = {}


class Rail(Struct, frozen=True, kw_only=True):
    """A supply rail, by its exact label.

    Attributes:
        role: Component that it feeds, for reports.
        child_of: Rail that contains it; a total never includes both.
    """

    label: str
    role: Literal["total", "cpu", "gpu", "compute", "soc", "memory", "system", "other"] = "other"
    child_of: str = ""


class PowerModel(Struct, frozen=True, kw_only=True):
    """Power without a sensor: `idle_w + busy_cores * core_w(f) + tx_w * sending + rx_w * receiving`.

    core_w(f) = core_joules_per_cycle * max_hertz * (f / max_hertz) ** exponent.

    Attributes:
        idle_w: Watts of the entire idle board.
        max_w: Upper bound of its watts.
        core_joules_per_cycle: Energy per cycle of one core at `max_hertz`.
        max_hertz: Clock that `core_joules_per_cycle` applies to.
        exponent: 1 for a fixed voltage, about 1.7 if it follows the clock.
        tx_w: Additional watts while sending at full rate.
        rx_w: Additional watts while receiving at full rate.
        uncertainty: One standard deviation, relative.
        uncertainty_w: Load-independent part of it in watts, such as a meter's own error.
        provenance: Origin of these figures.
    """

    idle_w: float
    max_w: float
    core_joules_per_cycle: float
    max_hertz: float
    exponent: float = 1.7
    tx_w: float = 0.0
    rx_w: float = 0.0
    uncertainty: float = 0.3
    uncertainty_w: float = 0.0
    provenance: str = ""


class Power(Struct, frozen=True, kw_only=True):
    """Power sources and supply of a board.

    Attributes:
        sources: Best first; a source that does not answer is skipped.
        rails: Known rails; others are reported but never summed.
        total: Labels whose sum is the total; never a rail together with one that contains it.
        scope: Extent of the total, from the module to the wall socket.
        gain: Correction of a sensor that misses some loads: corrected = gain * sum + offset_w, of quality `corrected`.
        uncertainty: One standard deviation of the total, relative.
        uncertainty_w: Load-independent part of it, in watts.
        sample_hz: Default sampling rate in hertz.
        max_hz: Rate above which the sensor repeats itself or costs too much.
        valid_w: Range of plausible totals; others are refused as invalid.
        supply_v: Range of volts at the board's input; an added power chip outside of it does not measure the total.
        model: Power model for when no sensor answers.
    """

    sources: tuple[Literal["ina3221", "pmic", "rapl", "ina2xx", "battery", "tegrastats", "http", "model"], ...] = (
        "model",
    )
    rails: tuple[Rail, ...] = ()
    total: tuple[str, ...] = ()
    scope: Literal["module", "board", "package", "machine", "wall"] = "board"
    gain: float = 1.0
    offset_w: float = 0.0
    uncertainty: float = 0.03
    uncertainty_w: float = 0.0
    sample_hz: float = 5.0
    max_hz: float = 20.0
    valid_w: tuple[float, float] = (0.05, 1000.0)
    supply_v: tuple[float, float] = (4.4, 60.0)
    model: PowerModel | None = None


class Thermal(Struct, frozen=True, kw_only=True):
    """Thermal zones of a board.

    Attributes:
        zones: Role by zone type; other types are reported too.
        ignore: Meaningless zone types, such as the constant 100 °C of PMIC-Die.
        accept_celsius: Range of plausible temperatures.
        throttle_celsius: Temperature from which the board slows down by itself; 0 if unknown.
    """

    zones: dict[str, str] = {}
    ignore: tuple[str, ...] = ()
    accept_celsius: tuple[float, float] = (-40.0, 125.0)
    throttle_celsius: float = 0.0


class Throttle(Struct, frozen=True, kw_only=True):
    """Sources that report throttling.

    Attributes:
        sources: All are read, best first.
        senses_undervoltage: Whether the board has an undervoltage detector; the Zero family has none and always reports
            that all is well.
        without_detector: Tokens of /proc/device-tree/compatible of boards of this profile that have no detector.
        intended_max_hertz: Intended clock cap, which is not throttling; 0 for none. The agent sets it to `max_hertz` of
            [board.target].
    """

    sources: tuple[Literal["firmware", "soctherm", "ina3221_alarm", "cooling_device", "clock"], ...] = (
        "cooling_device",
        "clock",
    )
    senses_undervoltage: bool = True
    without_detector: tuple[str, ...] = ()
    intended_max_hertz: float = 0.0


class PowerMode(Struct, frozen=True, kw_only=True):
    """Files and tool of a board's power modes.

    Attributes:
        kind: `nvpmodel` on a Jetson, else none.
        status: File with the current mode.
        conf: File with the names of the modes.
        needs_reboot: Names of modes that take effect only after a reboot (they change which cores are on).
    """

    kind: Literal["none", "nvpmodel"] = "none"
    status: str = "var/lib/nvpmodel/status"
    conf: str = "etc/nvpmodel.conf"
    needs_reboot: tuple[str, ...] = ()


class Memory(Struct, frozen=True, kw_only=True):
    """Memory: whether CPU and GPU share it, and bytes that a GPU context takes of it."""

    unified: bool = False
    gpu_context_bytes: int = 0


class Inference(Struct, frozen=True, kw_only=True):
    """Defaults for serving models, also during training; the agent's configuration takes precedence.

    Attributes:
        threads: Threads of ONNX Runtime per request.
        spin_us: Microseconds that a waiting thread spins before it sleeps, with several threads and frequent requests.
        arena: Whether ONNX Runtime keeps memory between requests: `on`, `off`, or `auto` for on from 1 GiB of memory.
        provider: Execution provider: `cpu`, or `auto` for the faster of GPU and CPU.
        trainer_nice: Nice value of the trainer.
        spared_cpus: Number of CPUs, counted from the first, that are left to serving while the board trains.
        origin: Origin of each figure that differs from the default, by its key.
    """

    threads: int = 1
    spin_us: int = 50
    arena: Literal["auto", "on", "off"] = "auto"
    provider: Literal["auto", "cpu"] = "cpu"
    trainer_nice: int = 10
    spared_cpus: int = 0
    origin: dict[str, str] = {}


class Training(Struct, frozen=True, kw_only=True):
    """Default compute device of training: the CPU, or `auto` for the GPU if torch supports it."""

    device: Literal["auto", "cpu"] = "cpu"


class Permissions(Struct, frozen=True, kw_only=True):
    """Groups, and udev or tmpfiles rules as complete lines, that let the agent's user read everything."""

    groups: tuple[str, ...] = ()
    udev: tuple[str, ...] = ()
    tmpfiles: tuple[str, ...] = ()
    note: str = ""


class Profile(Struct, frozen=True, kw_only=True):
    """Firmware profile of a board.

    Attributes:
        schema: Version of the file format: 1.
        id: Name in reports, equal to the file's name.
    """

    schema: int
    id: str
    name: str
    match: Match = Match()
    cpu: Cpu = Cpu()
    power: Power = Power()
    thermal: Thermal = Thermal()
    throttle: Throttle = Throttle()
    power_mode: PowerMode = PowerMode()
    memory: Memory = Memory()
    inference: Inference = Inference()
    trainer: Training = Training()
    permissions: Permissions = Permissions()

    def is_fallback(self) -> bool:
        """True for a fallback for boards without a profile, which should get their own."""
        return self.id.startswith(FALLBACK)
