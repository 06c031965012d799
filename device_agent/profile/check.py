"""Validate firmware profiles; every problem names its table and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import isfinite

from device_agent.profile.schema import Inference, Memory, Power, PowerMode, PowerModel, Profile

SCHEMA_VERSION = 1
RAIL_SOURCES = frozenset({"ina3221", "pmic", "tegrastats"})
"""Sources that read rails by label and provide no total."""

ZONE_ROLES = frozenset({"cpu", "gpu", "cv", "soc", "junction", "memory", "board", "pmic", "wifi", "other"})
MAX_SAMPLE_HZ = 1000.0
INFERENCE_BOUNDS = {"threads": (1, 1024), "spin_us": (0, 100_000), "trainer_nice": (0, 19), "spared_cpus": (0, 1023)}


def find_problems(profile: Profile) -> tuple[str, ...]:
    """Return the problems of a profile, one line each; empty if it is valid."""
    return (
        *_check_identity(profile),
        *_check_cpu(profile),
        *_check_rails(profile.power),
        *_check_total(profile.power, is_fallback=profile.is_fallback()),
        *_check_bounds(profile.power),
        *_check_figures(profile.power),
        *_check_thermal(profile),
        *_check_power_mode(profile.power_mode),
        *_check_memory(profile.memory),
        *_check_inference(profile.inference),
    )


def _check_identity(profile: Profile) -> Iterator[str]:
    if profile.schema != SCHEMA_VERSION:
        yield f"schema: {profile.schema} is not supported; write the profile as schema {SCHEMA_VERSION}"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", profile.id):
        yield f"id: {profile.id!r} must be lower-case words and numbers joined by '-', as the file is called"
    if not profile.name.strip():
        yield "name: is empty; write what people call the board"
    tokens = (*profile.match.compatible, *profile.match.dmi, *profile.match.machine)
    if any(token != token.strip() or not token.isprintable() or not token for token in tokens):
        yield "match: a token is empty or has blanks around it; write it exactly as the board reports it"


def _check_cpu(profile: Profile) -> Iterator[str]:
    cpu = profile.cpu
    first = [policy.first_cpu for policy in cpu.policies]
    if first != sorted(set(first)) or any(number < 0 for number in first):
        yield f"cpu.policies: first_cpu {first} must be increasing, as in sysfs; sort them and remove duplicates"
    if any(policy.max_hertz < 0 or not isfinite(policy.max_hertz) for policy in cpu.policies):
        yield "cpu.policies: max_hertz must be 0, for unknown, or more"
    if not cpu.sources:
        yield 'cpu.sources: is empty; name at least one, such as "cpufreq"'
    if not 0 <= cpu.nominal_hertz < float("inf") or not 0 <= cpu.low_opp_hertz < float("inf"):
        yield "cpu: nominal_hertz and low_opp_hertz must be 0, for unknown, or more"
    if not 0.5 <= cpu.low_opp_correction <= 1.5:  # noqa: PLR2004 - further off, it is no correction
        yield f"cpu.low_opp_correction: {cpu.low_opp_correction} must be a ratio of 0.5 to 1.5, 1 for none"


def _check_rails(power: Power) -> Iterator[str]:
    labels = [rail.label for rail in power.rails]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"power.rails: {label} occurs {labels.count(label)} times; keep one"
    parents = _map_parents(power)
    for label, parent in parents.items():
        if parent not in labels:
            yield f"power.rails: {label} is child_of unknown rail {parent}; add that rail or correct its label"
        elif label in _find_ancestors(label, parents):
            yield f"power.rails: {label} is its own ancestor by child_of; remove the cycle"
    if any(not label.strip() or label == "NC" for label in labels):
        yield "power.rails: a label is empty or NC (not connected); remove the rail"


def _check_total(power: Power, *, is_fallback: bool) -> Iterator[str]:
    labels, parents = {rail.label for rail in power.rails}, _map_parents(power)
    for label in power.total:
        if label not in labels:
            yield f"power.total: {label} is not in power.rails; add it there or correct its label"
        for ancestor in _find_ancestors(label, parents):
            if ancestor in power.total:
                yield f"power.total: {label} is already contained in {ancestor}; remove one of the two"
    if len(set(power.total)) < len(power.total):
        yield "power.total: a label occurs twice, and would be counted twice; keep one"
    if power.sources[:1] and power.sources[0] in RAIL_SOURCES and not power.total and not is_fallback:
        yield f"power.total: {power.sources[0]} reads rails; list those whose sum is the total, also in power.rails"


def _map_parents(power: Power) -> Mapping[str, str]:
    return {rail.label: rail.child_of for rail in power.rails if rail.child_of}


def _find_ancestors(label: str, parents: Mapping[str, str]) -> set[str]:
    """Return every rail that contains `label`, itself included if the parents form a cycle."""
    ancestors: set[str] = set()
    while (label := parents.get(label, "")) and label not in ancestors:
        ancestors.add(label)
    return ancestors


def _check_bounds(power: Power) -> Iterator[str]:
    for key, (low, high) in (("valid_w", power.valid_w), ("supply_v", power.supply_v)):
        if not 0 <= low < high < float("inf"):
            yield f"power.{key}: [{low}, {high}] must be two numbers, the lower first"


def _check_figures(power: Power) -> Iterator[str]:
    if not 0 < power.uncertainty <= 1:
        yield f"power.uncertainty: {power.uncertainty} must be a fraction above 0, up to 1"
    if not 0 <= power.uncertainty_w < float("inf"):
        yield f"power.uncertainty_w: {power.uncertainty_w} must be 0 or more watts"
    if not 0 < power.sample_hz <= power.max_hz <= MAX_SAMPLE_HZ:
        yield f"power.sample_hz: {power.sample_hz} must be above 0 and at most max_hz, {power.max_hz}"
    if not 0 < power.gain < float("inf") or not isfinite(power.offset_w):
        yield f"power.gain: {power.gain} must be above 0, and offset_w ({power.offset_w}) a finite number"
    if not power.sources or len(set(power.sources)) < len(power.sources):
        yield "power.sources: is empty or names a source twice; name each once, best first"
    if power.model is not None:
        yield from _check_model(power.model)
        if "model" not in power.sources:
            yield 'power.model: is never used; add "model" at the end of power.sources'


def _check_model(model: PowerModel) -> Iterator[str]:
    if not 0 < model.idle_w < model.max_w < float("inf"):
        yield f"power.model: idle_w {model.idle_w} and max_w {model.max_w} must be above 0, the first the smaller"
    if not 0 < model.core_joules_per_cycle < 1e-6 or not 0 < model.max_hertz < 1e11:  # noqa: PLR2004 - units mixed up
        yield "power.model: core_joules_per_cycle (about 5e-10) and max_hertz (about 1e9) are in joules and hertz"
    if not 1 <= model.exponent <= 3:  # noqa: PLR2004 - 3: the voltage proportional to the clock
        yield f"power.model.exponent: {model.exponent} must be 1, for a fixed voltage, to 3"
    if not (0 <= model.tx_w < float("inf") and 0 <= model.rx_w < float("inf")):
        yield "power.model: tx_w and rx_w must be 0 or more watts, the additional power of the radio"
    if not 0 < model.uncertainty <= 1:
        yield f"power.model.uncertainty: {model.uncertainty} must be a fraction above 0, up to 1"
    if not 0 <= model.uncertainty_w < float("inf"):
        yield f"power.model.uncertainty_w: {model.uncertainty_w} must be 0 or more watts"
    if not model.provenance.strip():
        yield "power.model.provenance: is empty; name the origin of these figures"


def _check_thermal(profile: Profile) -> Iterator[str]:
    thermal = profile.thermal
    for zone, role in thermal.zones.items():
        if role not in ZONE_ROLES:
            yield f"thermal.zones: {zone} = {role!r}; use one of {', '.join(sorted(ZONE_ROLES))}"
    for zone in sorted(thermal.zones.keys() & set(thermal.ignore)):
        yield f"thermal.ignore: {zone} is in thermal.zones too; remove one of the two"
    low, high = thermal.accept_celsius
    if not -273.15 <= low < high < float("inf"):  # noqa: PLR2004 - absolute zero
        yield f"thermal.accept_celsius: [{low}, {high}] must be two temperatures, the lower first"
    if thermal.throttle_celsius and not low < thermal.throttle_celsius <= high:
        yield f"thermal.throttle_celsius: {thermal.throttle_celsius} is outside accept_celsius [{low}, {high}]"


def _check_power_mode(mode: PowerMode) -> Iterator[str]:
    for key, path in (("status", mode.status), ("conf", mode.conf)):
        if path.startswith("/") or ".." in path.split("/"):
            yield f"power_mode.{key}: {path} must be below the board's root, written without the first '/'"


def _check_memory(memory: Memory) -> Iterator[str]:
    if memory.gpu_context_bytes < 0:
        yield f"memory.gpu_context_bytes: {memory.gpu_context_bytes} must be 0, for unknown, or more"


def _check_inference(inference: Inference) -> Iterator[str]:
    for key, (low, high) in INFERENCE_BOUNDS.items():
        if not low <= getattr(inference, key) <= high:
            yield f"inference.{key}: {getattr(inference, key)} must be {low} to {high}"
    usual, figures = Inference(), set(Inference.__struct_fields__) - {"origin", "provider"}
    for key in sorted(inference.origin.keys() - figures):
        yield f"inference.origin: unknown key {key!r}; use {', '.join(sorted(figures))}"
    for key in sorted(key for key in figures if getattr(inference, key) != getattr(usual, key)):
        if not inference.origin.get(key, "").strip():
            yield f"inference.{key}: differs from the default; name the figure's origin in inference.origin"


def find_conflicts(profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    """Return the conflicts between profiles of equal priority that claim the same token."""
    claims = sorted(
        (token, profile.match.priority, id_)
        for id_, profile in profiles.items()
        for token in (*profile.match.compatible, *profile.match.dmi, *profile.match.machine)
    )
    return tuple(
        f"match: {first} and {second} both claim {token!r}; raise the priority of one, or remove the token from one"
        for (token, priority, first), (same, equal, second) in pairwise(claims)
        if token == same and priority == equal
    )
