"""Acceptance gates of a release, in order; the first failure refuses it.

load       digests of its files, tensors as in the manifest and finite, a graph that ONNX Runtime runs
           (see `device_agent.inference.session`)
memory     all of this within the serving process's memory limit, beside the active version
signature  input and output as in the active version, so that applications need no change
probes     outputs for the release's synthetic inputs match those that PyTorch computed
latency    95th percentile within the limit, measured in alternation with the active version
accuracy   at most `max_drop` below the active version on the device's held-out examples, or the same of the metric by
           which another task is compared; where the device's own parameters replace a release's, these are compared

For a split network the gates run the lower half, as it will be served, against the probes' features. Its accuracy is
measured only if the whole network is loaded too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from device_agent.inference.candidate import GateVerdict
from device_agent.inference.gates.process import Entering, GateJob, OwnJob
from device_agent.inference.release_folder import read_own_header
from device_agent.inference.session import OpenModel, open_model
from device_agent.inference.soak import compute_latency_limit
from device_agent.inference.store import BoardStore
from shared.data.sources.arrays import Arrays
from shared.data.sources.read import read_held_out, standardise
from shared.data.spec import Data
from shared.errors import ConfigError, CorruptFile, ServingRefused, first_line
from shared.objectives.base import Objective
from shared.objectives.release_metric import drop_of, find_objective, measure
from shared.protocol.inference.release import (
    ReleaseManifest,
    ReleaseTask,
    describe_class_fault,
    read_manifest,
    write_manifest,
)
from shared.protocol.update import REASON_CHARS
from shared.runtime.file_digest import file_sha256
from shared.runtime.memory import MIB

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

MOST_ERROR = 1e-4
"""Allowed error relative to the largest output: processors differ in the order of additions."""
MOST_ERROR_INT8 = 0.1
"""The same for int8 releases, whose reference outputs may saturate elsewhere on another processor."""
WARM_UPS, ROUNDS, RUNS = 20, 3, 100
"""Latency takes the best of several rounds of runs, since other work may disturb one of them."""
MOST_ROUND_S = 20.0
"""Time limit of a round on a slow network."""
BATCH = 64
P95, ROUNDING = 0.95, 1e-9
_NO_MEMORY = ("bad_alloc", "Failed to allocate", "allocate memory", "MemoryError")


class GateFailed(Exception):
    """A gate refused the release.

    Attributes:
        lasting: Whether a second try would fail too.
    """

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


def run_gates(job: GateJob, report: Callable[[Entering], None], lift_limit: Callable[[], None]) -> GateVerdict:
    """Run all gates on a candidate and return the verdict.

    Args:
        report: Receives each gate before it runs.
        lift_limit: Raises this process's memory limit above the serving process's.
    """
    figures: dict[str, Any] = {}  # measured fields of the verdict so far
    try:
        _pass_gates(job, figures, report, lift_limit)
    except GateFailed as failure:
        return GateVerdict(reason=str(failure)[:REASON_CHARS], lasting=failure.lasting, **figures)
    return GateVerdict(**figures)


def compare_own_model(job: OwnJob) -> GateVerdict:
    """Compare the accuracy of the device's own parameters with the release's on held-out examples."""
    manifest = read_manifest(job.manifest, "manifest")
    objective = find_objective(manifest.task, manifest.source.plugins)
    examples = _load_held_out(job.data, manifest.task)
    if examples is None or objective is None:
        return GateVerdict()
    parts = {name: Path(path) for name, path in job.parts.items()}
    try:
        release = open_model(job.manifest, parts, job.settings)
        device_model = open_model(job.manifest, parts, job.settings, own_path=Path(job.own))
        if not device_model.own_model:
            return GateVerdict()  # another network's or damaged: the serving process logs it
        own, value = (measure_metric(objective, model, examples, job.data) for model in (device_model, release))
    except Exception as error:  # noqa: BLE001 - errors of ONNX Runtime's C++ code have no common class
        return GateVerdict(reason=first_line(error), lasting=False)
    reason = judge_metric(objective, own, value, len(examples), job.max_drop, "the release's parameters")
    return GateVerdict(reason=reason, **_figures(objective, own, value, len(examples)))


def _pass_gates(
    job: GateJob, figures: dict[str, Any], report: Callable[[Entering], None], lift_limit: Callable[[], None]
) -> None:
    store = BoardStore(Path(job.state_dir))
    report(Entering("load"))
    old = _open_committed(store, job)
    before = _resident_bytes()
    new = _open_version(store, job, job.candidate)
    _require(judge_classes(new.manifest))
    if old:
        _require(judge_signature(old.manifest, new.manifest))
    report(Entering("probes"))
    inputs, expected = _read_probes(store, new)
    with _explain_runtime(job):
        for _ in range(WARM_UPS):
            new.run(inputs[:1])
        figures["memory_bytes"] = max(0, _resident_bytes() - before)
        most = MOST_ERROR_INT8 if is_quantized(new.manifest) else MOST_ERROR
        _require(judge_probes([new.run(inputs), new.run(inputs[:1])], expected, most))
        report(Entering("latency"))
        _require(_measure_latency(figures, job, (old, new), inputs[:1]))
    report(Entering("accuracy"))
    if new.is_half and job.settings.cut and job.settings.cut.whole:
        full_model = _open_version(store, job, job.candidate, full=True)
        with _explain_runtime(job):
            inputs, expected = _read_probes(store, full_model)
            _require(judge_probes([full_model.run(inputs)], expected))
    lift_limit()
    _require(_measure_accuracy(figures, job, store))


def _require(problem: str) -> None:
    if problem:
        raise GateFailed(problem)


def _open_committed(store: BoardStore, job: GateJob) -> OpenModel | None:
    """Return the active version; None if there is none or it no longer loads."""
    try:
        return _open_version(store, job, job.committed) if job.committed else None
    except GateFailed as failure:
        log.warning("active version %s/%d cannot be opened: %s", job.name, job.committed, failure)
        return None


def _open_version(store: BoardStore, job: GateJob, version: int, *, full: bool = False) -> OpenModel:
    """Return a version ready to run: the lower half of a split network, unless `full` asks for the whole network."""
    with _explain_runtime(job):
        manifest = store.manifest(job.name, version)
        parts = {name: store.parts.path(part.sha256) for name, part in manifest.parts.items()}
        is_half = job.settings.cut is not None and manifest.halves is not None and not full
        return open_model(write_manifest(manifest), parts, job.settings, is_half=is_half)


def _open_answering(store: BoardStore, job: GateJob, version: int) -> OpenModel | None:
    """Return the model that answers for a version, with the device's own parameters if they belong to its network.

    None if the upper half runs on the server, or the version no longer loads.
    """
    try:
        manifest = store.manifest(job.name, version)
        if job.settings.cut and manifest.halves and not job.settings.cut.whole:
            return None
        own_path = _find_own_model(job, manifest)
        parts = {name: store.parts.path(part.sha256) for name, part in manifest.parts.items()}
        return open_model(write_manifest(manifest), parts, job.settings, own_path=own_path)
    except (ConfigError, CorruptFile, ServingRefused) as error:
        log.warning("%s/%d: its accuracy is not measured: %s", job.name, version, error)
        return None


def _find_own_model(job: GateJob, manifest: ReleaseManifest) -> Path | None:
    """Return the file of the device's own parameters if they belong to this release's network."""
    try:
        own_model = read_own_header(Path(job.own)) if job.own else None
    except CorruptFile:
        return None  # the serving process logs it
    return Path(job.own) if own_model and own_model.matches(manifest) else None


@contextmanager
def _explain_runtime(job: GateJob) -> Iterator[None]:
    """Turn errors of ONNX Runtime or of reading a release into a gate failure."""
    try:
        yield
    except GateFailed:
        raise
    except Exception as error:  # errors of ONNX Runtime's C++ code have no common class
        text = first_line(error)
        if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY):
            limit = f"{job.settings.memory_bytes / MIB:.0f} MiB"
            text = f"memory: it does not load within {limit} beside the active version ({text})"
            raise GateFailed(text) from error
        raise GateFailed(f"load: {text}") from error


def judge_classes(new: ReleaseManifest) -> str:
    """Describe a mismatch between class names and outputs; empty if there is none."""
    fault = describe_class_fault(new.classes, new.graph.output.shape)
    return f"signature: {fault}; create the release again, or applications show wrong classes" if fault else ""


def judge_signature(old: ReleaseManifest, new: ReleaseManifest) -> str:
    """Describe a change of input or output since the active version; empty if there is none."""
    for what in ("input", "output"):
        was, now = (getattr(manifest.graph, what) for manifest in (old, new))
        if was != now:
            change = f"{was.name} {was.dtype} {list(was.shape)}, now {now.name} {now.dtype} {list(now.shape)}"
            return f"signature: its {what} was {change}; release it under another name, or applications fail"
    return ""


def _read_probes(store: BoardStore, model: OpenModel) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a release's synthetic inputs and their expected outputs (features for a lower half)."""
    manifest = model.manifest
    path = store.parts.path(manifest.probes.sha256)
    try:
        if file_sha256(path) != manifest.probes.sha256:
            raise GateFailed(f"digest: the probes of {manifest.reference} are damaged: {path}", lasting=False)
        tensors = load_file(path)
        return tensors["inputs"], tensors["features" if model.is_half else "outputs"]
    except (OSError, SafetensorError, KeyError) as error:
        raise GateFailed(f"probes: {path} of {manifest.reference} cannot be read: {error}") from error


def is_quantized(manifest: ReleaseManifest) -> bool:
    """Return True if a release computes in int8."""
    return manifest.reduction is not None and manifest.reduction.kind == "int8"


def judge_probes(outputs: list[NDArray[Any]], expected: NDArray[Any], most: float = MOST_ERROR) -> str:
    """Describe a deviation of outputs from the expected ones; empty if there is none.

    Args:
        outputs: Batches of the first probes, each of shape (B, ...).
        expected: Outputs of all probes, shape (N, ...).
        most: Allowed error relative to the largest output.
    """
    largest = float(np.abs(expected).max())
    for batch in outputs:
        if batch.shape != expected[: len(batch)].shape:
            return f"probes: its outputs have shape {list(batch.shape)}, expected {list(expected.shape)}"
        if not np.isfinite(batch).all():
            return "finite: its outputs for the release's own probes contain NaN or infinity"
        error = float(np.abs(batch - expected[: len(batch)]).max())
        if error > most * largest:
            share = error / largest if largest else error
            return f"probes: its outputs differ from the expected ones by {share:.1e} of the largest, limit {most:g}"
    return ""


def _measure_latency(
    figures: dict[str, Any], job: GateJob, models: tuple[OpenModel | None, OpenModel], example: NDArray[Any]
) -> str:
    """Measure both latencies; return why the candidate is too slow in the last round, or ""."""
    old, new = models
    reason = ""
    for _ in range(ROUNDS):
        new_s, old_s = _time_alternately([new, old] if old else [new], example)
        figures |= {"p95_s": new_s, "old_p95_s": old_s}
        limit = compute_latency_limit(job.terms, old_s)
        if new_s <= limit:
            return ""
        took, most = new_s * 1e3, limit * 1e3
        reason = f"latency: 95th percentile {took:.3f} ms, allowed {most:.3f} ms"
    return reason


def _time_alternately(models: list[OpenModel], example: NDArray[Any]) -> tuple[float, float]:
    """Return the 95th percentiles of one or two models in seconds; 0 for a missing second."""
    seconds: list[list[float]] = [[] for _ in models]
    ends = time.monotonic() + MOST_ROUND_S
    while len(seconds[0]) < RUNS and (not seconds[0] or time.monotonic() < ends):
        for model, samples in zip(models, seconds, strict=True):
            began = time.perf_counter()
            model.run(example)
            samples.append(time.perf_counter() - began)
    p95s = [float(np.quantile(samples, P95)) for samples in seconds]
    return p95s[0], p95s[1] if len(p95s) > 1 else 0.0


def _measure_accuracy(figures: dict[str, Any], job: GateJob, store: BoardStore) -> str:
    """Measure both accuracies, or other metrics, if there are examples; return why the candidate is worse, or ""."""
    manifest = store.manifest(job.name, job.candidate)
    objective = find_objective(manifest.task, manifest.source.plugins)
    examples = _load_held_out(job.data, manifest.task) if job.data else None
    if examples is None or job.data is None or objective is None:
        return ""
    new = _open_answering(store, job, job.candidate)
    old = _open_answering(store, job, job.committed) if job.committed else None
    if new is None:
        return ""
    with _explain_runtime(job):
        try:
            value = measure_metric(objective, new, examples, job.data)
            old_value = measure_metric(objective, old, examples, job.data) if old else None
        except ConfigError as error:  # the metric does not accept the outputs
            raise GateFailed(f"accuracy: {error}") from error
    figures |= _figures(objective, value, old_value, len(examples))
    return judge_metric(objective, value, old_value, len(examples), job.terms.max_drop)


def _figures(objective: Objective, value: float | None, old_value: float | None, examples: int) -> dict[str, Any]:
    """Return the fields of a verdict about the compared metric."""
    if objective.metric == "accuracy":
        return {"accuracy": value, "old_accuracy": old_value, "examples": examples}
    return {"metric": objective.metric, "value": value, "old_value": old_value, "examples": examples}


def judge_metric(
    objective: Objective,
    value: float | None,
    reference: float | None,
    examples: int,
    max_drop: float,
    reference_name: str = "active version",
) -> str:
    """Describe a loss of accuracy, or of another metric, beyond the limit; empty if there is none.

    Args:
        value: Of the candidate; None if the examples do not define it.
        reference: Of the active version; None if there is none.
        max_drop: Allowed drop; of an error in the targets' unit, as a share of it.
        reference_name: Subject of `reference` in the message.
    """
    if value is None or reference is None or drop_of(objective, value, reference) <= max_drop + ROUNDING:
        return ""
    metric, digits = ("", ".3f") if objective.metric == "accuracy" else (f"{objective.metric} ", ".4g")
    return (
        f"accuracy: {metric}{value:{digits}} on {examples} local held-out examples; "
        f"{reference_name} {reference:{digits}}, allowed drop {max_drop:g}"
    )


def measure_metric(objective: Objective, model: OpenModel, examples: Arrays, data: Data) -> float | None:
    """Return the compared metric of a model on examples; None if they do not define it.

    Args:
        data: Source of the examples; the release's mean and deviation apply where it sets none.
    """
    prepared = model.manifest.preprocessing
    mean, std = ((), ()) if data.mean or data.std else (prepared.mean or (), prepared.std or ())
    inputs = standardise(examples.inputs.copy(), mean, std) if mean or std else examples.inputs
    return measure(objective, model.run, inputs, examples.labels)


def _load_held_out(data: Data, task: ReleaseTask | msgspec.UnsetType = msgspec.UNSET) -> Arrays | None:
    """Return the examples that the device's trainer holds out; None if there are none, or they lack targets."""
    if not data.holdout or not (data.has_classes if task is msgspec.UNSET else data.is_labelled):
        return None
    try:
        examples = read_held_out(data)
    except (ConfigError, OSError):
        return None  # the trainer reports it
    return examples if len(examples) else None


def _resident_bytes() -> int:
    """Return this process's resident memory in bytes; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * 4096
