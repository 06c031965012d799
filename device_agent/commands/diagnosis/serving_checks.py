"""Checks of what `[serve]` asks of a board, each with its remedy; pure, `serving` gathers what they judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_agent.commands.diagnosis.checks import AVAILABLE_MEMORY, MIB, Check
from device_agent.inference.settings import InferenceSettings
from device_agent.profile.schema import Profile
from device_agent.trainer.beside_serving import TOLD, USUAL, TrainerShare, format_share, origin_of
from shared.protocol.units import format_figure
from shared.protocol.update import UpdateRecord
from shared.runtime.extras import install_command

AUTO = "auto"
PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
RUNTIME_BYTES = 96 * MIB
"""Of its limit what Python, numpy and ONNX Runtime take before any model: LeNet is served within it, not within 80."""
OPENING_SHARE, SESSION_SHARE = 4, 2
"""Times its parameters that a model takes while it is opened, and afterwards.

Measured on x86-64 with ONNX Runtime 1.31: VGG-16 of 56 MiB is opened within 304 MiB and not within 288, a perceptron of
103 MiB within 448 and not within 384.
"""


def check_runtime(version: str, providers: Sequence[str], provider: str) -> Check:
    """Check that ONNX Runtime runs, and computes with what is asked for.

    Args:
        version: Of it; empty where it is not installed.
        providers: What it computes with, the best first; none where it does not run.
        provider: As `[serve] provider` names it.
    """
    name = "serve: runtime"
    if not version or not providers:
        finding = f"ONNX Runtime {version} does not run" if version else "ONNX Runtime is not installed"
        remedy = "see the line onnxruntime" if version else install_command("infer")
        return Check(name=name, state="bad", finding=finding, remedy=remedy)
    finding = f"ONNX Runtime {version}, {', '.join(provider_name.removesuffix('ExecutionProvider') for provider_name in providers)}"
    if provider == AUTO or PROVIDERS[provider] in providers:
        return Check(name=name, state="ok", finding=finding)
    remedy = f"install a build of ONNX Runtime that has it, or leave provider = {provider!r} of [serve] out"
    return Check(name=name, state="warn", finding=f"{finding}: no {provider}, so the CPU computes", remedy=remedy)


def check_port(port: int, refusal: str, *, is_taken: bool, agent_runs: bool) -> Check:
    """Check that the port is free, or answers where the agent runs.

    Args:
        port: Of 127.0.0.1; 0 for none.
        refusal: Why the system does not give it to us; empty where it does.
        is_taken: Whether that is because a process listens there.
        agent_runs: Whether an agent runs in this folder.
    """
    name, place = "serve: port", f"127.0.0.1:{port}"
    if not port:
        return Check(name=name, state="ok", finding="none: applications use the socket alone")
    if agent_runs and is_taken:
        return Check(name=name, state="ok", finding=f"{place} is answered while the agent runs")
    if agent_runs and not refusal:
        remedy = "its log says why; after a change of [serve], start it again"
        return Check(name=name, state="warn", finding=f"an agent runs, and nobody listens at {place}", remedy=remedy)
    if refusal:
        whose = f"`ss -ltnp 'sport = :{port}'` says whose it is; end that, or " if is_taken else ""
        remedy = f"{whose}name another port in [serve]"
        return Check(name=name, state="bad", finding=f"{place}: {refusal}", remedy=remedy)
    return Check(name=name, state="ok", finding=f"{place} is free")


def check_serving_memory(limit_bytes: int, weight_bytes: int, free_bytes: float | None) -> Check:
    """Check that the limit of memory has room for the largest model, and for the one that is to take its place.

    Args:
        limit_bytes: Of the inference process.
        weight_bytes: Of the largest model that is here; 0 where there is none.
        free_bytes: That the board has to give now; None where nobody knows.
    """
    name, limit = "serve: memory", format_figure(AVAILABLE_MEMORY, limit_bytes)
    single = RUNTIME_BYTES + OPENING_SHARE * weight_bytes
    two = single + SESSION_SHARE * weight_bytes
    what = f"with a model of {format_figure(AVAILABLE_MEMORY, weight_bytes)}" if weight_bytes else "with no model yet"
    finding = f"{limit} at most; about {format_figure(AVAILABLE_MEMORY, single)} {what}"
    if limit_bytes < single:
        remedy = f"set memory_mb of [serve] to {-(-two // MIB)} or more"
        return Check(name=name, state="bad", finding=f"{finding}: too little", remedy=remedy)
    if limit_bytes < two:
        remedy = f"set memory_mb of [serve] to {-(-two // MIB)}, else every rollout is refused here for want of memory"
        finding += ", and no room for the next version beside it"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    if free_bytes is not None and free_bytes < single:
        remedy = "end other programs, or add swap"
        finding += f", and {format_figure(AVAILABLE_MEMORY, free_bytes)} are available"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=finding)


def check_releases(
    folders: Mapping[str, int], records: Sequence[UpdateRecord], damages: Sequence[str], refusals: Sequence[str]
) -> Check:
    """Tell which releases are here, and which of them answer.

    Args:
        folders: Versions by name, of the folders that the agent's file names.
        records: Of names that rollouts brought.
        damages: What of them cannot be served, and why.
        refusals: Folders for which the agent does not start, and why.
    """
    name = "serve: releases"
    if refusals:
        remedy = "export that release again, or take the folder out of releases in [serve]"
        finding = f"the agent does not start: {'; '.join(refusals)}"
        return Check(name=name, state="bad", finding=finding, remedy=remedy)
    versions = [_release_words(record) for record in records if record.serving]
    brought = {record.name for record in records if record.serving}
    versions += [f"{model}/{version} of a folder" for model, version in folders.items() if model not in brought]
    if damages:
        remedy = "the next rollout of that name mends it; a folder is exported again"
        return Check(name=name, state="warn", finding="; ".join([*versions, *damages]), remedy=remedy)
    if versions:
        return Check(name=name, state="ok", finding="; ".join(versions))
    remedy = "`edge-server rollout start` brings one, or name a folder in releases of [serve]"
    return Check(name=name, state="ok", finding="none yet", remedy=remedy)


def _release_words(record: UpdateRecord) -> str:
    parts = [f"{record.name}/{record.serving}"]
    if record.phase == "trial":
        parts.append(f"on trial, {record.committed or 'nothing'} before it")
    elif record.previous:
        parts.append(f"{record.previous} kept")
    if record.phase in ("refused", "rolled-back"):
        parts.append(f"{record.candidate} was {record.phase}: {record.reason}")
    return ", ".join(parts)


def describe_settings(
    settings: InferenceSettings, configured: Mapping[str, bool], profile: Profile, share: TrainerShare | None
) -> Check:
    """Tell what the inference process is started with, and who says so.

    Args:
        configured: By key of `[serve]`, whether the agent's file says it.
        share: What the trainer takes of the processor; None where nothing is trained here.
    """
    origins = {key: TOLD if configured.get(key) else origin_of(profile, key) for key in ("threads", "spin_us", "arena")}
    spins = f"spinning for {settings.spin_us} us ({origins['spin_us']})" if settings.spin_us else "no spinning"
    arena = origins["arena"] if origins["arena"] != USUAL else "on from 1 GiB of memory"
    parts = [
        f"threads {settings.threads} ({origins['threads']})",
        spins,
        f"arena {'on' if settings.arena else 'off'} ({arena})",
    ]
    if share:
        parts.append(format_share(share))
    return Check(name="serve: settings", state="ok", finding="; ".join(parts))
