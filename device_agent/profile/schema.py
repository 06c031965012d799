"""Schema of a firmware profile: data only, one TOML file a board. Documented in firmware_profiles/README.md."""

from __future__ import annotations

from typing import Literal

import msgspec

FALLBACK = "generic-"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a profile; an unknown key is an error."""


class Match(Struct, frozen=True, kw_only=True):
    """Which boards a profile is for. Any of the tokens must be there; of several profiles the highest priority wins.

    Attributes:
        compatible: Exact tokens of /proc/device-tree/compatible. Never the model string: those are wrong too often.
        dmi: `sys_vendor`, `product_name` or `board_name` of a PC, exact.
        machine: As `uname -m` says, for fallbacks: `aarch64`, `armv7l`, `x86_64`.
    """

    compatible: tuple[str, ...] = ()
    dmi: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    priority: int = 0


class Policy(Struct, frozen=True, kw_only=True):
    """CPUs that share a clock, by their first number; `name` tells people which cluster it is."""

    first_cpu: int
    name: str = ""
    max_hertz: float = 0.0


class Cpu(Struct, frozen=True, kw_only=True):
    """The clocks of a board.

    Attributes:
        sources: Where the clock is read, best first: `firmware` (a Raspberry Pi's own word, which sysfs may not
            know), `cpufreq`, `cpuinfo`.
        driver_clock: Quality of what cpufreq announces: `measured` where a counting loop confirmed it on such a board,
            else `modelled`; a clock that the cores count themselves is measured everywhere.
        nominal_hertz: Where none of them answers.
        policies: As sysfs numbers them.
        low_opp_correction: Measured over announced clock below `low_opp_hertz` (1 for none).
        isa: Token of /proc/cpuinfo without which a library dies of SIGILL, by library.
    """

    sources: tuple[Literal["firmware", "cpufreq", "cpuinfo"], ...] = ("cpufreq", "cpuinfo")
    driver_clock: Literal["measured", "modelled"] = "measured"
    nominal_hertz: float = 0.0
    policies: tuple[Policy, ...] = ()
    low_opp_correction: float = 1.0
    low_opp_hertz: float = 0.0
    isa: dict[str, str] = {}


class Rail(Struct, frozen=True, kw_only=True):
    """One supply rail, by its exact label.

    Attributes:
        role: What it feeds, for people and reports.
        child_of: The rail that already contains it; it is reported and never added to a total that has its parent.
    """

    label: str
    role: Literal["total", "cpu", "gpu", "compute", "soc", "memory", "system", "other"] = "other"
    child_of: str = ""


class PowerModel(Struct, frozen=True, kw_only=True):
    """Watts where there is no sensor: `idle_w + busy_cores * core_w(f) + tx_w * sending + rx_w * receiving`.

    core_w(f) = core_joules_per_cycle * max_hertz * (f / max_hertz) ** exponent.

    Attributes:
        idle_w: All of the board while it does nothing.
        max_w: What it cannot exceed.
        core_joules_per_cycle: At `max_hertz`.
        max_hertz: The clock the figure above is for.
        exponent: 1 where the voltage is fixed, about 1.7 where it follows the clock.
        tx_w: More while it sends at full rate.
        rx_w: More while it receives at full rate.
        uncertainty: One standard deviation, as a share.
        uncertainty_w: The part of it that is the same at every load, in watts, such as a meter's own error.
        provenance: Whose figures these are.
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
    """What a board draws, and how it is known.

    Attributes:
        sources: Best first; what does not answer is passed over.
        rails: All that is known; others are reported and never summed.
        total: Labels whose sum is the total; never a rail together with one that contains it.
        scope: What the total covers.
        gain: Of a sensor that does not see everything: corrected = gain * sum + offset_w; quality is then `corrected`.
        uncertainty: One standard deviation of the total, as a share.
        uncertainty_w: The part of it that is the same at every load, in watts.
        sample_hz: Usual rate of reading.
        max_hz: Above it the sensor repeats itself, or costs too much.
        valid_w: Totals outside of it are refused as invalid.
        supply_v: Volts at the board's input; a power chip that was added and reads others is not the total.
        model: Where no sensor answers.
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
    """Temperatures.

    Attributes:
        zones: Role by type of zone; types that are not named here are reported too.
        ignore: Types that mean nothing, such as the constant 100 °C of PMIC-Die.
        accept_celsius: What lies outside is no temperature.
        throttle_celsius: From here on the board slows down by itself; 0 where nobody knows.
    """

    zones: dict[str, str] = {}
    ignore: tuple[str, ...] = ()
    accept_celsius: tuple[float, float] = (-40.0, 125.0)
    throttle_celsius: float = 0.0


class Throttle(Struct, frozen=True, kw_only=True):
    """Where a board says that it was slowed down.

    Attributes:
        sources: All are asked, best first.
        senses_undervoltage: Whether the board has a detector; the Zero family has none, and says all is well.
        without_detector: Tokens of /proc/device-tree/compatible of boards of this profile that have no detector.
        intended_max_hertz: Highest clock that somebody sets on purpose, 0 for none: a clock that is capped there is not
            throttled. The agent takes its own `max_hertz` of [board.target] for it.
    """

    sources: tuple[Literal["firmware", "soctherm", "ina3221_alarm", "cooling_device", "clock"], ...] = (
        "cooling_device",
        "clock",
    )
    senses_undervoltage: bool = True
    without_detector: tuple[str, ...] = ()
    intended_max_hertz: float = 0.0


class PowerMode(Struct, frozen=True, kw_only=True):
    """How a board's power mode is read and set.

    Attributes:
        kind: `nvpmodel` on a Jetson, else none.
        status: File that holds the mode now.
        conf: File that names the modes.
        needs_reboot: Modes, by name, that take effect only after a restart (they change which cores are on).
    """

    kind: Literal["none", "nvpmodel"] = "none"
    status: str = "var/lib/nvpmodel/status"
    conf: str = "etc/nvpmodel.conf"
    needs_reboot: tuple[str, ...] = ()


class Memory(Struct, frozen=True, kw_only=True):
    """Memory: whether CPU and GPU share it, and what a GPU context takes of it."""

    unified: bool = False
    gpu_context_bytes: int = 0


class Inference(Struct, frozen=True, kw_only=True):
    """How a board serves models, also while it trains, where its agent's file does not say.

    Attributes:
        threads: Of ONNX Runtime for one request.
        spin_us: Microseconds for which one of several threads that wait spins before it sleeps, where requests come
            often; 0 for never.
        arena: Whether ONNX Runtime keeps the memory of one request for the next: `on`, `off`, or `auto` for on where
            the board has 1 GiB or more.
        provider: What computes: `cpu`, or `auto` for the faster of GPU and CPU.
        trainer_nice: Nice value of the trainer.
        spared_cpus: How many CPUs, the first ones, are left to what serves while the board trains.
        origin: Where a figure is from, by its key; every one that is not the usual needs it.
    """

    threads: int = 1
    spin_us: int = 50
    arena: Literal["auto", "on", "off"] = "auto"
    provider: Literal["auto", "cpu"] = "cpu"
    trainer_nice: int = 10
    spared_cpus: int = 0
    origin: dict[str, str] = {}


class Training(Struct, frozen=True, kw_only=True):
    """How a board trains where its agent's file does not say: with its CPU, or with the GPU where torch reaches one."""

    device: Literal["auto", "cpu"] = "cpu"


class Permissions(Struct, frozen=True, kw_only=True):
    """What the agent's user needs in order to read everything: groups, and udev or tmpfiles rules as whole lines."""

    groups: tuple[str, ...] = ()
    udev: tuple[str, ...] = ()
    tmpfiles: tuple[str, ...] = ()
    note: str = ""


class Profile(Struct, frozen=True, kw_only=True):
    """A board.

    Attributes:
        schema: Version of this file's form; 1.
        id: Its name in reports; that of its file.
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
        """Return whether it is for boards that no other one is for, so that one should be named or written."""
        return self.id.startswith(FALLBACK)
