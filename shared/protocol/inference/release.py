"""Manifest of a model release, written by servers and read by boards.

A release is a manifest in JSON and parts that it references by SHA-256: an ONNX graph without parameters, the
parameters as safetensors, and probes. Readers ignore unknown keys of the same format, and refuse newer formats.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from shared.errors import ConfigError
from shared.protocol.bounded import Count, Line, Number, ReleaseName, Sha256, Size, Version
from shared.protocol.inputs import BYTE_SCALE
from shared.protocol.messages import PluginVersion, ProjectVersion, Spec
from shared.protocol.objective import MOST_METRICS
from shared.protocol.objective import Kind as TaskKind
from shared.protocol.versioned import decode_versioned

FORMAT = 1
"""Increased when an older reader would misread a manifest."""
MANIFEST, PARAMETERS, PROBES = "manifest.json", "parameters.safetensors", "probes.safetensors"
GRAPH, BOTTOM, TOP = "graph.onnx", "bottom.onnx", "top.onnx"
"""File names of the parts."""
MAX_MANIFEST_BYTES = 16 << 20
MOST_SHOWN = 12
"""Class names that a message lists."""
Kind: TypeAlias = Literal["int8", "float16"]
"""Methods that make a release smaller."""
_REFERENCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:/([1-9][0-9]{0,8}))?")


class ReleasePart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a release.

    Attributes:
        sha256: Hash of its bytes, 64 hexadecimal digits.
        size: Size of the file in bytes.
    """

    sha256: Sha256
    size: Size


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output tensor.

    Attributes:
        name: Name in the graph.
        dtype: `float32`, the only type so far.
        shape: The first extent is the batch: -1, any number of examples.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class ReleaseGraph(msgspec.Struct, frozen=True, kw_only=True):
    """An ONNX graph whose parameters are bound when it is loaded.

    Attributes:
        parameters: Names of the initializers to bind, equal to those in the parameters' file.
    """

    part: ReleasePart
    input: TensorSpec
    output: TensorSpec
    parameters: tuple[str, ...]


class SplitHalves(msgspec.Struct, frozen=True, kw_only=True):
    """The network in two graphs: the bottom's outputs are the top's inputs.

    Attributes:
        cut: Index of the cut, as the model numbers its cuts.
        bottom: The layers below, for a device.
        top: The layers above, for the server.
    """

    cut: Count
    bottom: ReleaseGraph
    top: ReleaseGraph


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the parameters' file.

    Attributes:
        name: Name in the network.
        dtype: In safetensors' notation: F32, I64; I8 and I32 of `int8`, F16 of `float16`.
        shape: Without a batch axis.
        sha256: Hash of its bytes: a tensor that another release has too need not be sent.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    sha256: Sha256


class Preprocessing(msgspec.Struct, frozen=True, kw_only=True):
    """Preprocessing of the training examples, in this order.

    Attributes:
        byte_scale: Divisor of stored values; 1 for none. Where `dtype` is empty, only bytes were divided, if there were
            any.
        dtype: Type of the stored values: `uint8` or `float32`; empty if unknown.
        mean: Subtracted from each channel, one number for all or one per channel; empty for nothing. None: the run's
            plan does not say, as where devices prepare their examples by files of their own.
        std: Divisor of each channel after that, one number for all or one per channel; empty and None as for `mean`.
        size: Height and width of a picture, else empty.
        layout: Axes of an input, N for the batch: `NCHW`, `NF`; empty if unknown.
        features: Column names of a table in the order of an input's numbers; empty if there are none or unknown.
    """

    byte_scale: float = BYTE_SCALE
    dtype: Literal["", "uint8", "float32"] = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, ...] = ()
    layout: str = ""
    features: tuple[str, ...] = ()


class ReleaseSource(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a model.

    Attributes:
        run: Name of the run.
        round: The last round whose updates it includes.
        plan: Name of the run's plan.
        personal: Whether devices of that method use models of their own; this is the server's.
        accuracy: Measured accuracy of this model, None if not measured.
        measured_on: Owner of those examples: `server` or `devices`; empty if not measured.
        plugins: Code of the user that it was trained with, in these versions; unset without any.
        project: Project with this code; boards use its version with the release. Unset without one.
    """

    run: Line
    round: Count
    plan: Line
    algorithm: Spec
    personal: bool = False
    accuracy: float | None = None
    measured_on: Line = ""
    plugins: tuple[PluginVersion, ...] | msgspec.UnsetType = msgspec.UNSET
    project: ProjectVersion | msgspec.UnsetType = msgspec.UNSET


class ReleaseTask(msgspec.Struct, frozen=True, kw_only=True):
    """Objective of a network, other than a classification by its accuracy.

    Attributes:
        metrics: Names of its metrics; by the first, models are compared.
        direction: Whether larger or smaller values of that are better.
        options: Options of the loss, which the metric shares: `q` of `quantile`.
        values: The metrics of this model where `ReleaseSource.measured_on` says.
    """

    kind: TaskKind
    metrics: Annotated[tuple[Line, ...], msgspec.Meta(min_length=1, max_length=MOST_METRICS + 1)]
    direction: Literal["max", "min"]
    options: dict[Line, bool | int | float | Line] = {}
    values: dict[Line, float] = {}


class Reduction(msgspec.Struct, frozen=True, kw_only=True):
    """Reduction of a release's size, with its effects measured on the server that made it.

    Attributes:
        kind: `int8`: weights and activations quantized to 8 bits. `float16`: the parameters' file holds 16-bit floats,
            which a board expands to the graph's 32 before it binds them.
        accuracy_before: Accuracy of the trained network on the server's examples; None for other tasks.
        accuracy: Accuracy of the reduced network on the same examples.
        metric: Metric of another task than a classification by its accuracy; unset for that.
        value_before, value: This metric of the two networks.
        examples: Number of these examples.
        calibrated_on: Number of other examples that calibrated the ranges of activations; 0 where none is needed.
        error: Largest difference of an output between the two on these examples, as a share of the largest output.
        bytes_before: Size of the unreduced parameters' file.
        seconds_before: Time of one example on one thread, unreduced; None where it is the same.
    """

    kind: Kind
    accuracy_before: float | None
    accuracy: float | None
    examples: int
    calibrated_on: int
    error: float
    bytes_before: int
    bytes_after: int
    seconds_before: float | None = None
    seconds_after: float | None = None
    metric: Line | msgspec.UnsetType = msgspec.UNSET
    value_before: float | msgspec.UnsetType = msgspec.UNSET
    value: float | msgspec.UnsetType = msgspec.UNSET


class ReleaseManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a release.

    Attributes:
        name: Name that applications use.
        version: Counted from 1 for each name, never reused.
        created: Calendar time, for people.
        model: The network and its options.
        source: Origin of the model.
        task: What it was trained for; unset for a classification without a table `[task]`.
        halves: The network in two halves, if requested.
        reduction: Size reduction; None for the network as trained.
        parameters: The file of parameters, shared by the graphs and halves.
        tensors: Its tensors, in file order.
        preprocessing: Preparation of inputs that applications must do.
        classes: Class names in the order of the outputs; empty where they are numbers.
        probes: File of ten synthetic `inputs` with the `outputs` that PyTorch computes of them, and `features` of
            halves; of `int8` with those that ONNX Runtime computed where it was made, from which another CPU's differ.
        versions: Versions of the software that wrote it.
        format: Format version, see `FORMAT`.
    """

    name: ReleaseName
    version: Version
    created: Line
    model: Spec
    source: ReleaseSource
    graph: ReleaseGraph
    parameters: ReleasePart
    tensors: tuple[ParameterSpec, ...]
    preprocessing: Preprocessing
    probes: ReleasePart
    opset: int
    ir_version: int
    halves: SplitHalves | None = None
    reduction: Reduction | None = None
    classes: tuple[str, ...] = ()
    versions: dict[Line, Line] = {}
    format: Number = FORMAT
    task: ReleaseTask | msgspec.UnsetType = msgspec.UNSET

    @property
    def reference(self) -> str:
        """Name and version, as commands accept it."""
        return f"{self.name}/{self.version}"

    @property
    def parts(self) -> dict[str, ReleasePart]:
        """Files by their names in a folder."""
        files = {GRAPH: self.graph.part, PARAMETERS: self.parameters, PROBES: self.probes}
        if self.halves:
            files |= {BOTTOM: self.halves.bottom.part, TOP: self.halves.top.part}
        return files


def describe_class_fault(classes: Sequence[str], outputs: Sequence[int]) -> str:
    """Describe a mismatch between class names and outputs; empty where they match, or there are no names.

    Args:
        classes: Names in the order of the outputs.
        outputs: Shape of the whole network's output: the batch, then one number for each class.
    """
    count = outputs[1] if len(outputs) > 1 else 0
    if not classes or len(classes) == count:
        return ""
    names = ", ".join(map(ascii, classes[:MOST_SHOWN])) + ", ..." * (len(classes) > MOST_SHOWN)
    return f"{len(classes)} class names ({names}) for {count} outputs"


def require_class_names(manifest: ReleaseManifest) -> None:
    """Refuse a release whose class names do not match its outputs, as versions up to 0.1 made them.

    Raises:
        ConfigError: They do not match.
    """
    if fault := describe_class_fault(manifest.classes, manifest.graph.output.shape):
        raise ConfigError(
            f"release {manifest.reference}: {fault}: applications would name wrong classes; train with as many classes "
            "in model.options as there are names, and create the release again"
        )


def sha256_of(data: bytes | memoryview) -> str:
    """Compute the SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def write_manifest(manifest: ReleaseManifest) -> bytes:
    """Encode a manifest as readable JSON, deterministically."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def read_manifest(data: bytes, place: str) -> ReleaseManifest:
    """Decode a manifest.

    Raises:
        ConfigError: It is of a newer format.
        CorruptFile: It is not a manifest, or one of its values is out of range.
    """
    return decode_versioned(data, ReleaseManifest, FORMAT, MAX_MANIFEST_BYTES, place)


def parse_reference(text: str) -> tuple[str, int]:
    """Parse `NAME` or `NAME/VERSION`; version 0 stands for the newest.

    Raises:
        ConfigError: It is neither.
    """
    if not (match := _REFERENCE.fullmatch(text)):
        raise ConfigError(f"release {text[:80]!r}: write NAME, or NAME/VERSION with a version from 1")
    return match[1], int(match[2] or 0)
