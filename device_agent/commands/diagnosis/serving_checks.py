"""Model-serving checks of `device-agent doctor`, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from device_agent.commands.diagnosis.checks import AVAILABLE_MEMORY, MIB, Check
from device_agent.inference.settings import InferenceSettings
from device_agent.profile.schema import Profile
from device_agent.trainer.processor_share import FROM_CONFIG, FROM_DEFAULT, TrainerShare, format_share, origin_of
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
"""Memory of Python, numpy and ONNX Runtime before any model: LeNet runs within it, but not within 80 MiB."""
OPENING_SHARE, SESSION_SHARE = 4, 2
"""Memory of a model while it is opened and afterwards, as multiples of its parameters.

Measured on x86-64 with ONNX Runtime 1.31: VGG-16 of 56 MiB opens within 304 MiB but not within 288, a perceptron of 103
MiB within 448 but not within 384.
"""


def check_runtime(version: str, providers: Sequence[str], provider: str) -> Check:
    """Check that ONNX Runtime runs and has the requested provider.

    Args:
        version: Version of ONNX Runtime; empty if not installed.
        providers: Available providers, best first; empty if it does not run.
        provider: Requested provider, as in `[serve] provider`.
    """
    name = "serve: runtime"
    if not version or not providers:
        finding = f"ONNX Runtime {version} does not run" if version else "ONNX Runtime is not installed"
        remedy = "see the line onnxruntime" if version else install_command("infer")
        return Check(name=name, state="bad", finding=finding, remedy=remedy)
    finding = f"ONNX Runtime {version}, {', '.join(item.removesuffix('ExecutionProvider') for item in providers)}"
    if provider == AUTO or PROVIDERS[provider] in providers:
        return Check(name=name, state="ok", finding=finding)
    remedy = f"install a build of ONNX Runtime that has it, or remove provider = {provider!r} from [serve]"
    return Check(name=name, state="warn", finding=f"{finding}: no {provider}, so the CPU computes", remedy=remedy)


def check_port(port: int, refusal: str, *, is_taken: bool, agent_runs: bool) -> Check:
    """Check that the port is free, or served by the running agent.

    Args:
        port: Port on 127.0.0.1; 0 for none.
        refusal: Why the port cannot be bound; empty if it can.
        agent_runs: Whether an agent is running with this folder.
    """
    name, place = "serve: port", f"127.0.0.1:{port}"
    if not port:
        return Check(name=name, state="ok", finding="none: applications use the socket only")
    if agent_runs and is_taken:
        return Check(name=name, state="ok", finding=f"{place} is served by the running agent")
    if agent_runs and not refusal:
        remedy = "see its log; restart it after a change of [serve]"
        return Check(
            name=name, state="warn", finding=f"an agent is running, but nothing listens at {place}", remedy=remedy
        )
    if refusal:
        owner = f"find its owner with `ss -ltnp 'sport = :{port}'` and stop it, or " if is_taken else ""
        remedy = f"{owner}name another port in [serve]"
        return Check(name=name, state="bad", finding=f"{place}: {refusal}", remedy=remedy)
    return Check(name=name, state="ok", finding=f"{place} is free")


def check_serving_memory(limit_bytes: int, weight_bytes: int, free_bytes: float | None) -> Check:
    """Check that the memory limit suffices for the largest model and for its successor beside it.

    Args:
        weight_bytes: Size of the largest model; 0 without models.
        free_bytes: Available memory of the board; None if unknown.
    """
    name, limit = "serve: memory", format_figure(AVAILABLE_MEMORY, limit_bytes)
    needed_bytes = RUNTIME_BYTES + OPENING_SHARE * weight_bytes
    rollout_bytes = needed_bytes + SESSION_SHARE * weight_bytes
    what = f"with a model of {format_figure(AVAILABLE_MEMORY, weight_bytes)}" if weight_bytes else "without a model"
    finding = f"{limit} at most; about {format_figure(AVAILABLE_MEMORY, needed_bytes)} {what}"
    if limit_bytes < needed_bytes:
        remedy = f"set memory_mb of [serve] to {-(-rollout_bytes // MIB)} or more"
        return Check(name=name, state="bad", finding=f"{finding}: too little", remedy=remedy)
    if limit_bytes < rollout_bytes:
        remedy = f"set memory_mb of [serve] to {-(-rollout_bytes // MIB)}, else rollouts are refused for lack of memory"
        finding += ", and no room for the next version beside it"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    if free_bytes is not None and free_bytes < needed_bytes:
        remedy = "stop other programs or add swap"
        finding += f", and {format_figure(AVAILABLE_MEMORY, free_bytes)} are available"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=finding)


def check_releases(
    folders: Mapping[str, int], records: Sequence[UpdateRecord], damages: Sequence[str], refusals: Sequence[str]
) -> Check:
    """Report which releases the board has and serves.

    Args:
        folders: Versions of the configured folders, by model name.
        damages: Parts that cannot be served, with the reason.
        refusals: Folders that prevent the agent's start, with the reason.
    """
    name = "serve: releases"
    if refusals:
        remedy = "export that release again, or remove the folder from releases in [serve]"
        finding = f"the agent does not start: {'; '.join(refusals)}"
        return Check(name=name, state="bad", finding=finding, remedy=remedy)
    versions = [_describe_release(record) for record in records if record.serving]
    brought = {record.name for record in records if record.serving}
    versions += [f"{model}/{version} of a folder" for model, version in folders.items() if model not in brought]
    if damages:
        remedy = "start a rollout of that model, or export the folder again"
        return Check(name=name, state="warn", finding="; ".join([*versions, *damages]), remedy=remedy)
    if versions:
        return Check(name=name, state="ok", finding="; ".join(versions))
    remedy = "start one with `edge-server rollout start`, or name a folder in releases of [serve]"
    return Check(name=name, state="ok", finding="none yet", remedy=remedy)


def _describe_release(record: UpdateRecord) -> str:
    parts = [f"{record.name}/{record.serving}"]
    if record.phase == "trial":
        parts.append(f"on trial, {record.committed or 'nothing'} previously")
    elif record.previous:
        parts.append(f"previous version {record.previous}")
    if record.phase in ("refused", "rolled-back"):
        parts.append(f"{record.candidate} was {record.phase}: {record.reason}")
    return ", ".join(parts)


def describe_settings(
    settings: InferenceSettings, configured: Mapping[str, bool], profile: Profile, share: TrainerShare | None
) -> Check:
    """Describe the settings of the inference process and their origin.

    Args:
        configured: Whether the agent's file sets the value, by key of `[serve]`.
        share: The trainer's share of the processor; None without training.
    """
    origins = {
        key: FROM_CONFIG if configured.get(key) else origin_of(profile, key) for key in ("threads", "spin_us", "arena")
    }
    spins = f"spinning for {settings.spin_us} us ({origins['spin_us']})" if settings.spin_us else "no spinning"
    arena = origins["arena"] if origins["arena"] != FROM_DEFAULT else "on from 1 GiB of memory"
    parts = [
        f"threads {settings.threads} ({origins['threads']})",
        spins,
        f"arena {'on' if settings.arena else 'off'} ({arena})",
    ]
    if share:
        parts.append(format_share(share))
    return Check(name="serve: settings", state="ok", finding="; ".join(parts))
