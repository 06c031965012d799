"""A model of a release in ONNX Runtime: its parameters bound to its graph by their names, without torch or onnx.

Parameters that are no numbers are refused here: ONNX Runtime takes them and answers with NaN.
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

from device_agent.inference.release_folder import OwnModel, own_digest, read_own
from device_agent.inference.settings import InferenceSettings
from shared.errors import ConfigError, CorruptFile, ServingRefused
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
from shared.runtime import backports
from shared.runtime.bounded_run import bounded_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

PROVIDERS: Mapping[str, Sequence[str]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""What `[serve] provider` may ask for, as ONNX Runtime calls it, the best first."""
AUTO = "auto"
"""What it may ask for too: whichever answers a model's first requests fastest, of CUDA and the CPU."""
OpenWith: TypeAlias = Callable[[Sequence[str]], tuple[Any, float]]
WARM_UPS = 3
ERRORS_ALONE = 3
"""ONNX Runtime's level of severity."""
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16"}
_DTYPES = {**_FLOATS, "I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"}


@dataclass(frozen=True)
class OpenModel:
    """A model that computes.

    Attributes:
        session: `onnxruntime.InferenceSession`.
        quick_s: Seconds of the fastest inference of one example, at its warm-up.
        seconds: What opening it took.
        is_half: Whether it is the lower half alone, whose output are features.
        own: Run and round of the device's own parameters, which answer in place of the release's; empty for these.
    """

    manifest: ReleaseManifest
    session: Any
    quick_s: float
    seconds: float
    is_half: bool = False
    own: str = ""

    @cached_property
    def graph(self) -> ReleaseGraph:
        """What computes."""
        return self.manifest.halves.bottom if self.is_half and self.manifest.halves else self.manifest.graph

    @cached_property
    def input(self) -> TensorSpec:
        """What goes in."""
        return self.graph.input

    @cached_property
    def output(self) -> TensorSpec:
        """What comes out."""
        return self.graph.output

    @property
    def provider(self) -> str:
        """What computes it, as ONNX Runtime calls that."""
        return str(self.session.get_providers()[0])

    def run(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return the output for a batch; ONNX Runtime's errors have no common class.

        Args:
            inputs: Of shape (B, ...) and the input's dtype.

        Raises:
            ServingRefused: It took too long.
        """
        feed, what = {self.input.name: inputs}, f"release {self.manifest.reference}"
        found: NDArray[Any] = bounded_run(self.session, [self.output.name], feed, what)[0]
        return found


def open_model(
    manifest: bytes,
    parts: Mapping[str, Path],
    settings: InferenceSettings,
    *,
    is_half: bool = False,
    own: Path | None = None,
) -> OpenModel:
    """Open a model and run it a few times.

    Args:
        parts: Its files, by the names that they have in a folder.
        is_half: Open the lower half alone; nothing else of the parameters is taken into memory.
        own: File of the device's own parameters; where they cannot be taken, the log says why and the release's are.

    Raises:
        ConfigError: The release has no halves, or is of a newer format, or this ONNX Runtime does not run its graph.
        CorruptFile: A file of it is damaged, gone, or not what the manifest says; or parameters are no numbers.
        ServingRefused: It does not end a run.
    """
    began, told = time.monotonic(), read_manifest(manifest, "manifest")
    what = f"release {told.reference}"
    _require_halves(told, is_half=is_half)
    _warn_of_classes(told)
    graph = told.halves.bottom if is_half and told.halves else told.graph
    data = _graph_of(parts, graph, what, is_half=is_half)
    tensors = _expanded(_parameters(parts, told, what, graph.parameters if is_half else None), told)
    tensors, own_is = _own_in_place(tensors, own, what) if own else (tensors, "")
    options = _session_options(settings)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(tensors[name]) for name in graph.parameters]
    if values:  # a half may have none
        options.add_external_initializers(list(graph.parameters), values)
    open_with = partial(_open_with, data, options, graph, what)
    available = onnxruntime.get_available_providers()
    if settings.provider == AUTO:
        session, quick_s = open_fastest(open_with, auto_choices(available), told.reference)
    else:
        session, quick_s = _open_named(open_with, settings.provider, available, told.reference)
    return OpenModel(told, session, quick_s, time.monotonic() - began, is_half, own_is)


def _graph_of(parts: Mapping[str, Path], graph: ReleaseGraph, what: str, *, is_half: bool) -> bytes:
    """Return the bytes of a graph that has no file read."""
    data = _whole(parts, BOTTOM if is_half else GRAPH, graph.part, what)
    require_no_files(data, graph.parameters, what)
    return data


def _require_halves(manifest: ReleaseManifest, *, is_half: bool) -> None:
    if is_half and manifest.halves is None:
        raise ConfigError(
            f"release {manifest.reference} has no halves: `edge-server release create --halves` makes one that has"
        )


def _warn_of_classes(manifest: ReleaseManifest) -> None:
    """Warn of class names that do not fit the outputs: they are not served, since each would be a wrong answer."""
    if fault := describe_class_fault(manifest.classes, manifest.graph.output.shape):
        log.warning(
            "release %s: %s: classes are served as numbers, without names; create the release again",
            manifest.reference,
            fault,
        )


def _open_with(
    data: bytes, options: Any, graph: ReleaseGraph, what: str, providers: Sequence[str]
) -> tuple[Any, float]:
    """Open a graph with providers, the best first; return the session and the seconds of its fastest run."""
    try:
        session = onnxruntime.InferenceSession(data, options, providers=list(providers))
        _require_signature(session, graph, what)
        return session, _warm_up(session, graph, what)
    except (ConfigError, CorruptFile, ServingRefused):
        raise
    except Exception as error:  # of its C++ code, by no common class
        raise ConfigError(f"{what}: this ONNX Runtime does not run its graph: {_first_line(error)}") from error


def _open_named(open_with: OpenWith, provider: str, available: Sequence[str], name: str) -> tuple[Any, float]:
    """Open a model with the named provider, or with the closest one that works, and log which."""
    providers, fallen = choose_providers(provider, available)
    session, quick_s = open_with(providers)
    used = session.get_providers()[0]
    if not fallen and used != providers[0]:
        fallen = f"{providers[0]} could not be loaded"
    if fallen:
        log.warning("serve.provider: %s: %s computes model %s", fallen, used, name)
    return session, quick_s


def auto_choices(available: Sequence[str]) -> list[Sequence[str]]:
    """List the choices that `auto` times: the GPU by CUDA where this build has it, and the CPU.

    TensorRT is not tried, since it takes minutes to compile a model.
    """
    return [PROVIDERS[name] for name in ("cuda", "cpu") if PROVIDERS[name][0] in available]


def open_fastest(open_with: OpenWith, choices: Sequence[Sequence[str]], name: str) -> tuple[Any, float]:
    """Open a model with each of several choices of providers, and keep the one that answers fastest.

    Args:
        open_with: Opens it with providers; returns the session and the seconds of its fastest run.
        choices: Each with its preferred provider first; the last one must work.
        name: Of the model, for the log.

    Raises:
        ConfigError: The last choice does not run it.
    """
    opened: list[tuple[float, Any]] = []
    for providers in choices:
        try:
            session, quick_s = open_with(providers)
        except ConfigError as error:
            if providers is choices[-1]:
                raise
            log.warning("serve.provider: %s: %s is not used: %s", name, providers[0], error)
            continue
        if session.get_providers()[0] == providers[0]:
            opened.append((quick_s, session))
        else:
            log.warning("serve.provider: %s: %s could not be loaded", name, providers[0])
    quick_s, fastest = min(opened, key=lambda one: one[0])
    if len(opened) > 1:
        told = ", ".join(f"{session.get_providers()[0]} {seconds * 1e3:.3g} ms" for seconds, session in opened)
        log.info("model %s: %s computes it: %s", name, fastest.get_providers()[0], told)
    return fastest, quick_s


def choose_providers(wanted: str, available: Sequence[str]) -> tuple[list[str], str]:
    """Return what may compute a model, the best first, and in words what is missing of what was asked for.

    Args:
        wanted: As `[serve]` names it.
        available: Of this build of ONNX Runtime.
    """
    asked = PROVIDERS[wanted]
    lacking = [one for one in asked if one not in available]
    said = f"this build of ONNX Runtime has no {' and no '.join(lacking)}" if lacking else ""
    return [one for one in asked if one in available], said


def _session_options(settings: InferenceSettings) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads  # a number also keeps it from pinning threads to cores
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = settings.arena
    options.log_severity_level = ERRORS_ALONE
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if settings.spin_us else "0")
    if settings.spin_us:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(settings.spin_us))
    return options


def _whole(parts: Mapping[str, Path], name: str, part: ReleasePart, what: str) -> bytes:
    """Return a file that has its digest."""
    path = parts[name]
    try:
        data = path.read_bytes() if path.stat().st_size == part.size else b""
    except OSError as error:
        raise CorruptFile(f"{what}: {path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise CorruptFile(f"{what}: {path} is damaged: it does not have its digest")
    return data


def _parameters(
    parts: Mapping[str, Path], told: ReleaseManifest, what: str, names: Sequence[str] | None
) -> dict[str, NDArray[Any]]:
    """Return tensors of the parameters' file, None for all: whole, as the manifest describes them, and finite."""
    path = parts[PARAMETERS]
    try:
        with path.open("rb") as file:
            digest = backports.file_digest(file, "sha256").hexdigest()
        if digest != told.parameters.sha256:
            raise CorruptFile(f"{what}: {path} is damaged: it does not have its digest")
        with safe_open(path, framework="numpy") as file:
            tensors: dict[str, NDArray[Any]] = {
                name: file.get_tensor(name) for name in (file.keys() if names is None else names)
            }
    except (OSError, SafetensorError) as error:
        raise CorruptFile(f"{what}: {path}: its parameters cannot be read: {error}") from error
    described = {
        one.name: (_DTYPES.get(one.dtype, one.dtype), tuple(one.shape))
        for one in told.tensors
        if names is None or one.name in names
    }
    found = {name: (str(one.dtype), one.shape) for name, one in tensors.items()}
    if found != described:
        odd = next(name for name in sorted(found.keys() | described) if found.get(name) != described.get(name))
        raise CorruptFile(f"{what}: parameter {odd!r} is {found.get(odd)}, and its manifest says {described.get(odd)}")
    for name, one in sorted(tensors.items()):
        if not np.isfinite(one).all():
            raise CorruptFile(f"{what}: parameter {name!r} has numbers that are NaN or infinite")
    return tensors


def _expanded(tensors: dict[str, NDArray[Any]], told: ReleaseManifest) -> dict[str, NDArray[Any]]:
    """Return parameters as the graph takes them: those that travelled as 16 bits, as 32."""
    if not told.reduction or told.reduction.kind != "float16":
        return tensors
    return {name: one.astype(np.float32) if one.dtype == np.float16 else one for name, one in tensors.items()}


def _own_in_place(tensors: dict[str, NDArray[Any]], path: Path, what: str) -> tuple[dict[str, NDArray[Any]], str]:
    """Return the device's own parameters with their run and round; the release's where they cannot take their place."""
    try:
        own, found = _read_own(path)
        _require_alike(found, tensors)
    except (CorruptFile, OSError, SafetensorError, TypeError) as error:
        log.warning("%s: its own parameters answer, not the device's: %s", what, error)
        return tensors, ""
    return found, f"{own.run}@{own.round}"


def _read_own(path: Path) -> tuple[OwnModel, dict[str, NDArray[Any]]]:
    """Return the device's own parameters, whole, with what they are of."""
    own = read_own(path)
    if own is None:
        raise CorruptFile(f"{path} is gone")
    with safe_open(path, framework="numpy") as file:
        found = {name: file.get_tensor(name) for name in list(file.keys())}
    if own_digest({name: one.tobytes() for name, one in found.items()}) != own.contents:
        raise CorruptFile(f"{path} is damaged: it does not have its digest")
    return own, found


def _require_alike(own: Mapping[str, NDArray[Any]], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Refuse parameters that the graph would not take, or that are no numbers."""
    told, wanted = ({name: (str(one.dtype), one.shape) for name, one in some.items()} for some in (own, tensors))
    if told != wanted:
        odd = next(name for name in sorted(told.keys() | wanted) if told.get(name) != wanted.get(name))
        raise CorruptFile(f"parameter {odd!r} is {told.get(odd)}, and the release's {wanted.get(odd)}")
    for name, one in sorted(own.items()):
        if not np.isfinite(one).all():
            raise CorruptFile(f"parameter {name!r} has numbers that are NaN or infinite")


def _require_signature(session: Any, graph: ReleaseGraph, what: str) -> None:
    """Refuse a graph whose input or output is not the manifest's; an extent that the graph leaves open fits any."""
    for one, wanted in ((session.get_inputs(), graph.input), (session.get_outputs(), graph.output)):
        if [known.name for known in one] != [wanted.name]:
            raise CorruptFile(
                f"{what}: its graph has {[known.name for known in one]}, and its manifest {wanted.name!r}"
            )
        known = one[0].shape
        pairs = zip(known[1:], wanted.shape[1:], strict=False)
        differs = any(isinstance(extent, int) and extent != said for extent, said in pairs)
        if len(known) != len(wanted.shape) or differs:
            raise CorruptFile(f"{what}: {wanted.name!r} is {known}, and its manifest says {list(wanted.shape)}")


def _warm_up(session: Any, graph: ReleaseGraph, what: str) -> float:
    """Run it on zeros; return the seconds of the fastest run."""
    zeros = np.zeros((1, *graph.input.shape[1:]), graph.input.dtype)
    fastest = float("inf")
    for _ in range(WARM_UPS):
        began = time.monotonic()
        bounded_run(session, [graph.output.name], {graph.input.name: zeros}, what)
        fastest = min(fastest, time.monotonic() - began)
    return fastest


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
