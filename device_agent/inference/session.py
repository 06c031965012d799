"""ONNX Runtime session of a release, with verified parameters.

Needs neither torch nor onnx. Non-finite parameters are refused: ONNX Runtime accepts them and answers with NaN.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnxruntime
from safetensors import SafetensorError, safe_open

from device_agent.inference.release_folder import OwnModel, compute_own_digest, read_own_header
from device_agent.inference.settings import InferenceSettings
from shared.errors import ConfigError, CorruptFile, ServingRefused, first_line
from shared.protocol.inference.onnx_graph import require_no_files
from shared.protocol.inference.release import (
    BOTTOM,
    GRAPH,
    PARAMETERS,
    ReleaseGraph,
    ReleaseManifest,
    ReleasePart,
    TensorSpec,
    describe_class_fault,
    read_manifest,
)
from shared.runtime.bounded_run import bounded_run
from shared.runtime.file_digest import file_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

PROVIDERS: Mapping[str, Sequence[str]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""Execution providers of ONNX Runtime by their name in `[serve] provider`, the preferred one first."""
AUTO = "auto"
"""Further value of `[serve] provider`: times CUDA and the CPU on the model and takes the faster one."""
OpenWith: TypeAlias = Callable[[Sequence[str]], tuple[Any, float]]
WARM_UPS = 3
ERROR_LEVEL = 3
"""ONNX Runtime's severity level that logs errors only."""
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16"}
_DTYPES = {**_FLOATS, "I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"}


@dataclass(frozen=True)
class OpenModel:
    """A model ready to run.

    Attributes:
        quick_s: Seconds of the fastest warm-up run with one example.
        seconds: Seconds taken to open it, warm-up included.
        is_half: Whether this is the lower half alone, whose output is features.
        own_model: `RUN@ROUND` of the device's own parameters, if these are used; empty for the release's.
    """

    manifest: ReleaseManifest
    session: Any
    quick_s: float
    seconds: float
    is_half: bool = False
    own_model: str = ""

    @cached_property
    def graph(self) -> ReleaseGraph:
        """The graph that runs: the lower half's or the whole network's."""
        return self.manifest.halves.bottom if self.is_half and self.manifest.halves else self.manifest.graph

    @cached_property
    def input(self) -> TensorSpec:
        """Input tensor of the graph."""
        return self.graph.input

    @cached_property
    def output(self) -> TensorSpec:
        """Output tensor of the graph."""
        return self.graph.output

    @property
    def provider(self) -> str:
        """Execution provider in use, by ONNX Runtime's name."""
        return str(self.session.get_providers()[0])

    def run(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return the outputs of a batch. ONNX Runtime's own errors have no common class and pass through.

        Args:
            inputs: Shape (B, ...), with the input's dtype.

        Raises:
            ServingRefused: The run took too long.
        """
        feed, label = {self.input.name: inputs}, f"release {self.manifest.reference}"
        outputs: NDArray[Any] = bounded_run(self.session, [self.output.name], feed, label)[0]
        return outputs


def open_model(
    manifest: bytes,
    parts: Mapping[str, Path],
    settings: InferenceSettings,
    *,
    is_half: bool = False,
    own_path: Path | None = None,
) -> OpenModel:
    """Open a model and warm it up.

    Args:
        parts: Paths of the release's files by their names in an exported folder.
        is_half: Open the lower half alone and read only its parameters.
        own_path: File of the device's own parameters; if unusable, a warning is logged and the release's are used.

    Raises:
        ConfigError: The release has no halves, has a newer format, or its graph does not run in this ONNX Runtime.
        CorruptFile: A file is damaged, missing or differs from the manifest, or parameters are not finite.
        ServingRefused: A run does not end.
    """
    began, release = time.monotonic(), read_manifest(manifest, "manifest")
    label = f"release {release.reference}"
    _require_halves(release, is_half=is_half)
    _warn_about_classes(release)
    graph = release.halves.bottom if is_half and release.halves else release.graph
    data = _read_graph(parts, graph, label, is_half=is_half)
    tensors = _widen_float16(_read_parameters(parts, release, label, graph.parameters if is_half else None), release)
    tensors, own_is = _substitute_own(tensors, own_path, label) if own_path else (tensors, "")
    options = _session_options(settings)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(tensors[name]) for name in graph.parameters]
    if values:  # a half may have no parameters
        options.add_external_initializers(list(graph.parameters), values)
    open_with = partial(_open_with, data, options, graph, label)
    available = onnxruntime.get_available_providers()
    if settings.provider == AUTO:
        session, quick_s = open_fastest_session(open_with, list_auto_providers(available), release.reference)
    else:
        session, quick_s = _open_named(open_with, settings.provider, available, release.reference)
    return OpenModel(release, session, quick_s, time.monotonic() - began, is_half, own_is)


def _read_graph(parts: Mapping[str, Path], graph: ReleaseGraph, label: str, *, is_half: bool) -> bytes:
    """Return a serialised graph that refers to no external files."""
    data = _read_part(parts, BOTTOM if is_half else GRAPH, graph.part, label)
    require_no_files(data, graph.parameters, label)
    return data


def _require_halves(manifest: ReleaseManifest, *, is_half: bool) -> None:
    if is_half and manifest.halves is None:
        raise ConfigError(
            f"release {manifest.reference} has no halves; create it again with `edge-server release create --halves`"
        )


def _warn_about_classes(manifest: ReleaseManifest) -> None:
    """Warn about class names that do not match the outputs. They are not served, since each would be a wrong answer."""
    if fault := describe_class_fault(manifest.classes, manifest.graph.output.shape):
        log.warning(
            "release %s: %s; classes are served as numbers without names: create the release again",
            manifest.reference,
            fault,
        )


def _open_with(
    data: bytes, options: Any, graph: ReleaseGraph, label: str, providers: Sequence[str]
) -> tuple[Any, float]:
    """Open a graph with the given providers, preferred first; return the session and the seconds of its fastest run."""
    try:
        session = onnxruntime.InferenceSession(data, options, providers=list(providers))
        _require_signature(session, graph, label)
        return session, _warm_up(session, graph, label)
    except (ConfigError, CorruptFile, ServingRefused):
        raise
    except Exception as error:  # errors of ONNX Runtime's C++ code have no common class
        raise ConfigError(f"{label}: this ONNX Runtime cannot run its graph: {first_line(error)}") from error


def _open_named(open_with: OpenWith, provider: str, available: Sequence[str], name: str) -> tuple[Any, float]:
    """Open a model with the named provider or its best available fallback, and log a fallback."""
    providers, problem = choose_providers(provider, available)
    session, quick_s = open_with(providers)
    used = session.get_providers()[0]
    if not problem and used != providers[0]:
        problem = f"{providers[0]} could not be loaded"
    if problem:
        log.warning("serve.provider: %s; model %s runs on %s", problem, name, used)
    return session, quick_s


def list_auto_providers(available: Sequence[str]) -> list[Sequence[str]]:
    """List the providers that `auto` times: CUDA, if this build has it, and the CPU.

    TensorRT is left out because it takes minutes to compile a model.
    """
    return [PROVIDERS[name] for name in ("cuda", "cpu") if PROVIDERS[name][0] in available]


def open_fastest_session(open_with: OpenWith, choices: Sequence[Sequence[str]], name: str) -> tuple[Any, float]:
    """Open a model with each choice of providers and keep the fastest.

    Args:
        open_with: Opens the model with providers; returns the session and the seconds of its fastest run.
        choices: Each lists its preferred provider first; the last choice must work.
        name: Model reference for the log.

    Raises:
        ConfigError: The last choice does not run the model.
    """
    timed: list[tuple[float, Any]] = []
    for providers in choices:
        try:
            session, quick_s = open_with(providers)
        except ConfigError as error:
            if providers is choices[-1]:
                raise
            log.warning("serve.provider: model %s: %s does not work: %s", name, providers[0], error)
            continue
        if session.get_providers()[0] == providers[0]:
            timed.append((quick_s, session))
        else:
            log.warning("serve.provider: model %s: %s could not be loaded", name, providers[0])
    quick_s, fastest = min(timed, key=lambda entry: entry[0])
    if len(timed) > 1:
        timings = ", ".join(f"{session.get_providers()[0]} {seconds * 1e3:.3g} ms" for seconds, session in timed)
        log.info("model %s runs on %s: %s", name, fastest.get_providers()[0], timings)
    return fastest, quick_s


def choose_providers(provider: str, available: Sequence[str]) -> tuple[list[str], str]:
    """Return the available providers, preferred first, and a message about missing ones (empty if none is missing).

    Args:
        provider: A key of `PROVIDERS`.
        available: Providers of this build of ONNX Runtime.
    """
    preferred = PROVIDERS[provider]
    lacking = [name for name in preferred if name not in available]
    problem = f"this build of ONNX Runtime has no {' and no '.join(lacking)}" if lacking else ""
    return [name for name in preferred if name in available], problem


def _session_options(settings: InferenceSettings) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads  # an explicit number also prevents pinning to cores
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = settings.arena
    options.log_severity_level = ERROR_LEVEL
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if settings.spin_us else "0")
    if settings.spin_us:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(settings.spin_us))
    return options


def _read_part(parts: Mapping[str, Path], name: str, part: ReleasePart, label: str) -> bytes:
    """Return the content of a file after checking its digest."""
    path = parts[name]
    try:
        data = path.read_bytes() if path.stat().st_size == part.size else b""
    except OSError as error:
        raise CorruptFile(f"{label}: {path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise CorruptFile(f"{label}: {path} is damaged: it does not have its digest")
    return data


def _read_parameters(
    parts: Mapping[str, Path], manifest: ReleaseManifest, label: str, names: Sequence[str] | None
) -> dict[str, NDArray[Any]]:
    """Return the parameters, checked against the manifest and finite.

    Args:
        names: Tensors to read; None for all.
    """
    path = parts[PARAMETERS]
    try:
        if file_sha256(path) != manifest.parameters.sha256:
            raise CorruptFile(f"{label}: {path} is damaged: it does not have its digest")
        with safe_open(path, framework="numpy") as file:
            tensors: dict[str, NDArray[Any]] = {
                name: file.get_tensor(name) for name in (file.keys() if names is None else names)
            }
    except (OSError, SafetensorError) as error:
        raise CorruptFile(f"{label}: {path}: its parameters cannot be read: {error}") from error
    expected = {
        tensor.name: (_DTYPES.get(tensor.dtype, tensor.dtype), tuple(tensor.shape))
        for tensor in manifest.tensors
        if names is None or tensor.name in names
    }
    _require_tensors(tensors, expected, f"{label}: parameter", "its manifest says")
    return tensors


def _require_tensors(
    tensors: Mapping[str, NDArray[Any]], expected: Mapping[str, tuple[str, tuple[int, ...]]], subject: str, source: str
) -> None:
    """Refuse tensors that differ in name, dtype or shape from the expected ones, or are not finite."""
    actual = {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    if actual != expected:
        odd = next(name for name in sorted(actual.keys() | expected) if actual.get(name) != expected.get(name))
        raise CorruptFile(f"{subject} {odd!r} is {actual.get(odd)}, and {source} {expected.get(odd)}")
    for name, tensor in sorted(tensors.items()):
        if not np.isfinite(tensor).all():
            raise CorruptFile(f"{subject} {name!r} has numbers that are NaN or infinite")


def _widen_float16(tensors: dict[str, NDArray[Any]], manifest: ReleaseManifest) -> dict[str, NDArray[Any]]:
    """Convert parameters that were reduced to float16 to the float32 that the graph takes."""
    if not manifest.reduction or manifest.reduction.kind != "float16":
        return tensors
    return {
        name: tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor for name, tensor in tensors.items()
    }


def _substitute_own(tensors: dict[str, NDArray[Any]], path: Path, label: str) -> tuple[dict[str, NDArray[Any]], str]:
    """Return the device's own parameters and their `RUN@ROUND`; the release's and "" if they do not fit."""
    try:
        own_model, own_tensors = _read_own(path)
        expected = {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
        _require_tensors(own_tensors, expected, "parameter", "the release's")
    except (CorruptFile, OSError, SafetensorError, TypeError) as error:
        log.warning("%s: the device's own parameters are not used: %s", label, error)
        return tensors, ""
    return own_tensors, f"{own_model.run}@{own_model.round}"


def _read_own(path: Path) -> tuple[OwnModel, dict[str, NDArray[Any]]]:
    """Return the header and the tensors of the device's own parameters."""
    own_model = read_own_header(path)
    if own_model is None:
        raise CorruptFile(f"{path} is missing")
    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if compute_own_digest({name: tensor.tobytes() for name, tensor in tensors.items()}) != own_model.contents:
        raise CorruptFile(f"{path} is damaged: it does not have its digest")
    return own_model, tensors


def _require_signature(session: Any, graph: ReleaseGraph, label: str) -> None:
    """Refuse a graph whose input or output differs from the manifest's; its dynamic dimensions match any size."""
    for arguments, spec in ((session.get_inputs(), graph.input), (session.get_outputs(), graph.output)):
        if [argument.name for argument in arguments] != [spec.name]:
            raise CorruptFile(
                f"{label}: its graph has {[argument.name for argument in arguments]}, and its manifest {spec.name!r}"
            )
        shape = arguments[0].shape
        pairs = zip(shape[1:], spec.shape[1:], strict=False)
        differs = any(isinstance(extent, int) and extent != expected for extent, expected in pairs)
        if len(shape) != len(spec.shape) or differs:
            raise CorruptFile(f"{label}: {spec.name!r} is {shape}, and its manifest says {list(spec.shape)}")


def _warm_up(session: Any, graph: ReleaseGraph, label: str) -> float:
    """Run the model on zeros; return the seconds of the fastest run."""
    zeros = np.zeros((1, *graph.input.shape[1:]), graph.input.dtype)
    fastest = float("inf")
    for _ in range(WARM_UPS):
        began = time.monotonic()
        bounded_run(session, [graph.output.name], {graph.input.name: zeros}, label)
        fastest = min(fastest, time.monotonic() - began)
    return fastest
