"""What a release must pass before it may answer, in order; the first gate that it fails is the cause of its refusal.

load       its files have their digests, its tensors are those that the manifest tells, all of them are finite,
           ONNX Runtime runs its graph (see `device_agent.inference.session`)
memory     all that within the limit of the process that serves, beside the version that serves now
signature  what goes in and comes out is as of that version: applications need not change
probes     of the release's made-up inputs come the outputs that PyTorch computed
latency    the 95th percentile of its answers is within the limit, measured in turns with that version's
accuracy   on the device's own held-out examples it is at most `max_drop` below that version's; where the device's own
           parameters answer in place of a release's, it is they that are compared

Of a network that is cut, the lower half is tried out as it will run here, against the probes' features; its accuracy is
known only where the whole network is loaded too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from device_agent.inference.candidate import GateVerdict
from device_agent.inference.gates.process import Entering, GateJob, OwnJob
from device_agent.inference.release_folder import read_own
from device_agent.inference.session import OpenModel, open_model
from device_agent.inference.soak import latency_limit
from device_agent.inference.store import BoardStore, digest_of
from shared.data.sources.read import read_held_out
from shared.data.spec import Data
from shared.errors import ConfigError, CorruptFile, ServingRefused
from shared.protocol.inference.release import ReleaseManifest, describe_class_fault, write_manifest
from shared.protocol.update import REASON_CHARS
from shared.runtime.memory import MIB

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

MOST_ERROR = 1e-4
"""Largest difference from PyTorch's outputs, as a share of the largest: another processor adds in another order."""
MOST_ERROR_INT8 = 0.1
"""The same of 8 bits, where ONNX Runtime computed the outputs on a processor that may saturate in other places."""
WARM_UPS, ROUNDS, RUNS = 20, 3, 100
"""Latency is measured in rounds of so many runs, of which the best one counts: something else may be at work."""
MOST_ROUND_S = 20.0
"""After which a round of a slow network ends."""
BATCH = 64
P95 = 0.95
_NO_MEMORY = ("bad_alloc", "Failed to allocate", "allocate memory", "MemoryError")


class GateFailed(Exception):
    """A release is refused.

    Attributes:
        lasting: Whether it would be again.
    """

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


def try_out(job: GateJob, say: Callable[[Entering], None], lift_limit: Callable[[], None]) -> GateVerdict:
    """Return what becomes of a release.

    Args:
        job: What to try out.
        say: Hears of each gate before it is entered.
        lift_limit: Lets this process take more memory than the one that serves.
    """
    told = _Told()
    try:
        _pass_gates(job, told, say, lift_limit)
    except GateFailed as failure:
        return GateVerdict(reason=str(failure)[:REASON_CHARS], lasting=failure.lasting, **told.figures)
    return GateVerdict(**told.figures)


def try_own(job: OwnJob) -> GateVerdict:
    """Return whether the device's own parameters may answer for a release: as accurate as its are, or nearly."""
    held = _held_out(job.data)
    if held is None:
        return GateVerdict()
    parts = {name: Path(path) for name, path in job.parts.items()}
    try:
        release = open_model(job.manifest, parts, job.settings)
        own = open_model(job.manifest, parts, job.settings, own=Path(job.own))
        if not own.own:
            return GateVerdict()  # they are not of its network, or damaged: whoever serves it says so
        found, was = (measure_accuracy(one, *held) for one in (own, release))
    except Exception as error:  # noqa: BLE001 - of ONNX Runtime's C++ code, by no common class
        return GateVerdict(reason=str(error).partition("\n")[0], lasting=False)
    reason = judge_accuracy(found, was, len(held[1]), job.max_drop, "the release's")
    return GateVerdict(reason=reason, accuracy=found, old_accuracy=was, examples=len(held[1]))


@dataclass
class _Told:
    """Figures of a verdict, as far as they are known."""

    figures: dict[str, Any] = field(default_factory=dict)


def _pass_gates(job: GateJob, told: _Told, say: Callable[[Entering], None], lift_limit: Callable[[], None]) -> None:
    store = BoardStore(Path(job.state_dir))
    say(Entering("load"))
    old = _open_committed(store, job)
    before = _resident()
    new = _open(store, job, job.candidate)
    _require(judge_classes(new.manifest))
    if old:
        _require(judge_signature(old.manifest, new.manifest))
    say(Entering("probes"))
    inputs, expected = _probes(store, new)
    with _explain_runtime(job):
        for _ in range(WARM_UPS):
            new.run(inputs[:1])
        told.figures["memory_bytes"] = max(0, _resident() - before)
        most = MOST_ERROR_INT8 if is_quantized(new.manifest) else MOST_ERROR
        _require(judge_probes([new.run(inputs), new.run(inputs[:1])], expected, most))
        say(Entering("latency"))
        _require(_measure_latency(told, job, (old, new), inputs[:1]))
    say(Entering("accuracy"))
    if new.is_half and job.settings.cut and job.settings.cut.whole:
        whole = _open(store, job, job.candidate, whole=True)
        with _explain_runtime(job):
            inputs, expected = _probes(store, whole)
            _require(judge_probes([whole.run(inputs)], expected))
    lift_limit()
    _require(_measure_accuracy(told, job, store))


def _require(problem: str) -> None:
    if problem:
        raise GateFailed(problem)


def _open_committed(store: BoardStore, job: GateJob) -> OpenModel | None:
    """Return the version that serves; None where there is none, or it does not even load any more."""
    try:
        return _open(store, job, job.committed) if job.committed else None
    except GateFailed as failure:
        log.warning("%s/%d serves, but: %s", job.name, job.committed, failure)
        return None


def _open(store: BoardStore, job: GateJob, version: int, *, whole: bool = False) -> OpenModel:
    """Return a version ready to run: of a network that is cut here its lower half, unless the whole is asked for."""
    with _explain_runtime(job):
        manifest = store.manifest(job.name, version)
        parts = {name: store.path(part.sha256) for name, part in manifest.parts.items()}
        is_half = job.settings.cut is not None and manifest.halves is not None and not whole
        return open_model(write_manifest(manifest), parts, job.settings, is_half=is_half)


def _open_answering(store: BoardStore, job: GateJob, version: int) -> OpenModel | None:
    """Return what answers where a version serves: with the device's own parameters where it has some of that network.

    None where a part of the network is the server's, or the version does not load any more.
    """
    try:
        manifest = store.manifest(job.name, version)
        if job.settings.cut and manifest.halves and not job.settings.cut.whole:
            return None
        own = _own_of(job, manifest)
        parts = {name: store.path(part.sha256) for name, part in manifest.parts.items()}
        return open_model(write_manifest(manifest), parts, job.settings, own=own)
    except (ConfigError, CorruptFile, ServingRefused) as error:
        log.warning("%s/%d: its accuracy is not measured: %s", job.name, version, error)
        return None


def _own_of(job: GateJob, manifest: ReleaseManifest) -> Path | None:
    """Return the file of the device's own parameters, if they are of a release's network."""
    try:
        own = read_own(Path(job.own)) if job.own else None
    except CorruptFile:
        return None  # whoever serves it says so
    return Path(job.own) if own and own.model == manifest.model else None


@contextmanager
def _explain_runtime(job: GateJob) -> Iterator[None]:
    """Turn what ONNX Runtime, or the reading of a release, says against a model into its refusal."""
    try:
        yield
    except GateFailed:
        raise
    except Exception as error:  # of ONNX Runtime's C++ code, by no common class
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, MemoryError) or any(one in str(error) for one in _NO_MEMORY):
            limit = f"{job.settings.memory_bytes / MIB:.0f} MiB"
            text = f"memory: it does not load within {limit} beside the version that serves ({text})"
            raise GateFailed(text) from error
        raise GateFailed(f"load: {text}") from error


def judge_classes(new: ReleaseManifest) -> str:
    """Return how a release's class names do not fit its outputs; empty where they do."""
    fault = describe_class_fault(new.classes, new.graph.output.shape)
    return f"signature: {fault}: applications would name wrong classes; create the release again" if fault else ""


def judge_signature(old: ReleaseManifest, new: ReleaseManifest) -> str:
    """Return in what a release takes or gives another tensor than the one before it; empty where they are alike.

    Args:
        old: Of the version that serves.
    """
    for what, was, is_ in (("input", old.graph.input, new.graph.input), ("output", old.graph.output, new.graph.output)):
        if was != is_:
            told = f"{was.name} {was.dtype} {list(was.shape)}, now {is_.name} {is_.dtype} {list(is_.shape)}"
            return f"signature: its {what} was {told}: applications would fail; release it under another name"
    return ""


def _probes(store: BoardStore, model: OpenModel) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a release's made-up inputs, and what comes of them: outputs, or features of a lower half."""
    manifest = model.manifest
    path = store.path(manifest.probes.sha256)
    try:
        if digest_of(path) != manifest.probes.sha256:
            raise GateFailed(f"digest: the probes of {manifest.reference} are damaged: {path}", lasting=False)
        found = load_file(path)
        return found["inputs"], found["features" if model.is_half else "outputs"]
    except (OSError, SafetensorError, KeyError) as error:
        raise GateFailed(f"probes: those of {manifest.reference} cannot be read: {error}") from error


def is_quantized(manifest: ReleaseManifest) -> bool:
    """Tell whether a release computes with 8 bits."""
    return manifest.reduction is not None and manifest.reduction.kind == "int8"


def judge_probes(found: list[NDArray[Any]], expected: NDArray[Any], most: float = MOST_ERROR) -> str:
    """Return by how much outputs differ from what they should be; empty where they do not.

    Args:
        found: Of batches of the first probes, each of shape (B, ...).
        expected: Of all probes, shape (N, ...).
        most: Largest difference as a share of the largest output.
    """
    largest = float(np.abs(expected).max())
    for one in found:
        if one.shape != expected[: len(one)].shape:
            return f"probes: its outputs have the shape {list(one.shape)}, and should have {list(expected.shape)}"
        if not np.isfinite(one).all():
            return "finite: its outputs for the release's own probes hold NaN or infinity"
        error = float(np.abs(one - expected[: len(one)]).max())
        if error > most * largest:
            share = error / largest if largest else error
            return f"probes: its outputs differ by {share:.1e} from those that it should have"
    return ""


def _measure_latency(
    told: _Told, job: GateJob, models: tuple[OpenModel | None, OpenModel], example: NDArray[Any]
) -> str:
    """Measure both latencies; return why the new one's is too long, in the last of its rounds."""
    old, new = models
    reason = ""
    for _ in range(ROUNDS):
        new_s, old_s = _take_turns([new, old] if old else [new], example)
        told.figures |= {"p95_s": new_s, "old_p95_s": old_s}
        limit = latency_limit(job.terms, old_s)
        if new_s <= limit:
            return ""
        took, most = new_s * 1e3, limit * 1e3
        reason = f"latency: 95 % of its answers take up to {took:.3f} ms, and {most:.3f} are allowed"
    return reason


def _take_turns(models: list[OpenModel], example: NDArray[Any]) -> tuple[float, float]:
    """Return the 95th percentiles of one or two models' seconds, 0 for one that is not there."""
    seconds: list[list[float]] = [[] for _ in models]
    ends = time.monotonic() + MOST_ROUND_S
    while len(seconds[0]) < RUNS and (not seconds[0] or time.monotonic() < ends):
        for model, taken in zip(models, seconds, strict=True):
            began = time.perf_counter()
            model.run(example)
            taken.append(time.perf_counter() - began)
    found = [float(np.quantile(taken, P95)) for taken in seconds]
    return found[0], found[1] if len(found) > 1 else 0.0


def _measure_accuracy(told: _Told, job: GateJob, store: BoardStore) -> str:
    """Measure both accuracies, where there are examples; return why the new one's is too low."""
    held = _held_out(job.data) if job.data else None
    if held is None:
        return ""
    inputs, labels = held
    new = _open_answering(store, job, job.candidate)
    old = _open_answering(store, job, job.committed) if job.committed else None
    if new is None:
        return ""
    with _explain_runtime(job):
        found = measure_accuracy(new, inputs, labels)
        was = measure_accuracy(old, inputs, labels) if old else None
    told.figures |= {"accuracy": found, "old_accuracy": was, "examples": len(labels)}
    return judge_accuracy(found, was, len(labels), job.terms.max_drop)


def judge_accuracy(found: float, was: float | None, examples: int, max_drop: float, other: str = "before it") -> str:
    """Return by how much a release is less accurate than it may be; empty where it is not.

    Args:
        found: Its share of right answers.
        was: That of the version that serves; None where there is none.
        examples: On how many examples of this device.
        max_drop: By how much it may be lower.
        other: What `was` is of.
    """
    rounding = 1e-9
    if was is None or found >= was - max_drop - rounding:
        return ""
    return f"accuracy: {found:.3f} on {examples} examples held out here, {other} {was:.3f}; {max_drop:g} less may be"


def measure_accuracy(model: OpenModel, inputs: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the share of examples whose largest output is their class.

    Args:
        inputs: Of shape (N, ...).
        labels: int64 of shape (N,).
    """
    right = 0
    for start in range(0, len(labels), BATCH):
        outputs = model.run(inputs[start : start + BATCH])
        right += int((outputs.argmax(1) == labels[start : start + BATCH]).sum())
    return right / len(labels)


def _held_out(data: Data) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return the examples that this device's training never sees, as its trainer holds them out; None for none."""
    if not data.holdout or not data.is_labelled:
        return None
    try:
        held = read_held_out(data)
    except (ConfigError, OSError):
        return None  # its training says so
    return (held.inputs, held.labels) if len(held) else None


def _resident() -> int:
    """Return the bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * 4096
