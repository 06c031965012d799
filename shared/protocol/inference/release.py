"""What a release says of itself: the manifest that a server writes and that boards serve a model by.

A release is a manifest in JSON and the parts that it names by their SHA-256: an ONNX graph without parameters, the
parameters as safetensors, and probes. Readers tolerate unknown keys of the same format, and refuse newer formats.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from shared.errors import ConfigError, CorruptFile
from shared.protocol.bounded import Count, Line, Number, ReleaseName, Sha256, Size, Version
from shared.protocol.inputs import BYTE_SCALE
from shared.protocol.messages import Spec

FORMAT = 1
"""Counted up where an older reader would take a manifest wrong."""
MANIFEST, PARAMETERS, PROBES = "manifest.json", "parameters.safetensors", "probes.safetensors"
GRAPH, BOTTOM, TOP = "graph.onnx", "bottom.onnx", "top.onnx"
"""Names of the parts in a folder."""
MAX_MANIFEST_BYTES = 16 << 20
MOST_SHOWN = 12
"""Class names that a message lists."""
Kind: TypeAlias = Literal["int8", "float16"]
"""What makes a release smaller."""
_REFERENCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:/([1-9][0-9]{0,8}))?")


class ReleasePart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a release.

    Attributes:
        sha256: Of its bytes, as 64 hexadecimal digits.
        size: In bytes.
    """

    sha256: Sha256
    size: Size


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that goes in or comes out.

    Attributes:
        name: As the graph names it.
        dtype: `float32`.
        shape: The first extent is the batch: -1, any number of examples.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class ReleaseGraph(msgspec.Struct, frozen=True, kw_only=True):
    """An ONNX graph that is given its parameters when it is loaded.

    Attributes:
        parameters: Names of the initializers that must be bound, which are those of the parameters' file.
    """

    part: ReleasePart
    input: TensorSpec
    output: TensorSpec
    parameters: tuple[str, ...]


class SplitHalves(msgspec.Struct, frozen=True, kw_only=True):
    """The network in two graphs: what the bottom puts out goes into the top.

    Attributes:
        cut: Where, as the model counts its cuts.
        bottom: The layers below, for a device.
        top: The layers above, for the server.
    """

    cut: Count
    bottom: ReleaseGraph
    top: ReleaseGraph


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the parameters' file.

    Attributes:
        name: As the network names it.
        dtype: As safetensors writes it: F32, I64; I8 and I32 of `int8`, F16 of `float16`.
        shape: None of them is a batch.
        sha256: Of its bytes: what is the same as in another release need not travel.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    sha256: Sha256


class Preprocessing(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to the examples that it was trained on, in this order.

    Attributes:
        byte_scale: What a stored value was divided by; 1 where it stayed as it was. Where `dtype` is empty only bytes
            were divided, if there were any.
        dtype: Of the stored values: `uint8` or `float32`; empty: not known.
        mean: What was subtracted from each channel, one number for all or one a channel; empty for nothing. None: the
            run's plan does not say, as where devices prepare their examples by files of their own.
        std: What each channel was divided by after that; likewise.
        size: Height and width of a picture, else empty.
        layout: What each extent of an input is, N for one input after the other: `NCHW`, `NF`; empty: not known.
        features: Names of a table's columns in the order of an input's numbers; empty: there are none, or not known.
    """

    byte_scale: float = BYTE_SCALE
    dtype: Literal["", "uint8", "float32"] = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: tuple[int, ...] = ()
    layout: str = ""
    features: tuple[str, ...] = ()


class ReleaseSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model comes from.

    Attributes:
        run: Name of the run.
        round: The last round that it learnt from.
        plan: Name of the run's plan.
        personal: Whether devices of that method use models of their own; this is the server's.
        accuracy: What was measured of this model, None where nobody did.
        measured_on: Whose examples that was on: `server` or `devices`; empty for nobody's.
    """

    run: Line
    round: Count
    plan: Line
    algorithm: Spec
    personal: bool = False
    accuracy: float | None = None
    measured_on: Line = ""


class Reduction(msgspec.Struct, frozen=True, kw_only=True):
    """What made a release smaller, and what that took and gave, measured on the server that made it.

    Attributes:
        kind: `int8`: weights and activations of 8 bits, quantized. `float16`: the parameters' file holds 16-bit floats,
            which a board expands to the graph's 32 before it binds them; all else is as without.
        accuracy_before: Of the trained network on examples of the server's.
        accuracy: Of this one on the same.
        examples: How many these are.
        calibrated_on: Others that ranges of activations were taken from; 0 where nothing needs them.
        error: Largest difference of an output between the two on these examples, as a share of the largest output.
        bytes_before: Size of the parameters' file without.
        seconds_before: Time of one example on one thread without; None where it is the same.
    """

    kind: Kind
    accuracy_before: float
    accuracy: float
    examples: int
    calibrated_on: int
    error: float
    bytes_before: int
    bytes_after: int
    seconds_before: float | None = None
    seconds_after: float | None = None


class ReleaseManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A release.

    Attributes:
        name: What applications call the model.
        version: Counted from 1 for each name, none given twice.
        created: Calendar time, for people.
        model: The network and its options.
        source: Where it comes from.
        halves: The same in two halves, where that was asked for.
        reduction: What made it smaller; None for the network as it was trained.
        parameters: The file of parameters, which the graphs and halves share.
        tensors: What is in it.
        preprocessing: What an application does to its inputs before.
        classes: Names of the classes in the order of the outputs; empty where they are numbers.
        probes: File of ten made-up `inputs` with the `outputs` that PyTorch computes of them, and `features` of halves;
            of `int8` with those that ONNX Runtime computed where it was made, from which another CPU's differ.
        versions: Of what wrote it.
        format: See `FORMAT`.
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

    @property
    def reference(self) -> str:
        """What commands call it."""
        return f"{self.name}/{self.version}"

    @property
    def parts(self) -> dict[str, ReleasePart]:
        """Its files by the names that they have in a folder."""
        found = {GRAPH: self.graph.part, PARAMETERS: self.parameters, PROBES: self.probes}
        if self.halves:
            found |= {BOTTOM: self.halves.bottom.part, TOP: self.halves.top.part}
        return found


class _Format(msgspec.Struct):
    format: int


def describe_class_fault(classes: Sequence[str], outputs: Sequence[int]) -> str:
    """Return how the class names of a release do not fit its outputs; empty where they do, or where it names none.

    Args:
        classes: Names in the order of the outputs.
        outputs: Shape of the whole network's output: the batch, then one number for each class.
    """
    count = outputs[1] if len(outputs) > 1 else 0
    if not classes or len(classes) == count:
        return ""
    shown = ", ".join(map(ascii, classes[:MOST_SHOWN])) + ", ..." * (len(classes) > MOST_SHOWN)
    return f"{len(classes)} class names ({shown}) for {count} outputs"


def require_class_names(manifest: ReleaseManifest) -> None:
    """Refuse a release whose class names do not fit its outputs, as versions up to 0.1 made them.

    Raises:
        ConfigError: As said.
    """
    if fault := describe_class_fault(manifest.classes, manifest.graph.output.shape):
        raise ConfigError(
            f"release {manifest.reference}: {fault}: applications would name wrong classes; train with as many classes "
            "in model.options as there are names, and create the release again"
        )


def sha256_of(data: bytes | memoryview) -> str:
    """Return the digest of some bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def write_manifest(manifest: ReleaseManifest) -> bytes:
    """Return a manifest as JSON that people can read; the same one gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"


def read_manifest(data: bytes, place: str) -> ReleaseManifest:
    """Read a manifest.

    Args:
        data: As `write_manifest` makes it.
        place: Where it lies, for the error.

    Raises:
        ConfigError: It is of a newer format.
        CorruptFile: It is not a manifest, or one of its values is out of range.
    """
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise CorruptFile(f"{place}: {len(data)} bytes, more than any manifest has")
        found = msgspec.json.decode(data, type=_Format).format
        if found > FORMAT:
            raise ConfigError(
                f"{place}: a release of format {found}, and this fieldfleet reads up to {FORMAT}: update it"
            )
        return msgspec.json.decode(data, type=ReleaseManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"{place}: it is no manifest of a release ({error})") from error


def parse_reference(text: str) -> tuple[str, int]:
    """Return name and version of a release that is named `NAME` or `NAME/VERSION`; version 0 stands for the newest.

    Raises:
        ConfigError: It is neither.
    """
    if not (found := _REFERENCE.fullmatch(text)):
        raise ConfigError(f"release {text[:80]!r}: write NAME, or NAME/VERSION with a version from 1")
    return found[1], int(found[2] or 0)
