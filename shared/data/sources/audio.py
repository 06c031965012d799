"""Sound files in class folders, as log-mel features; see `class_files` for the folders.

libsndfile decodes WAV, FLAC and Ogg. Channels are averaged.
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from shared.data.classes import normalise_class_names
from shared.data.formats import Mel
from shared.data.sources.arrays import FLOAT_BYTES, Arrays, ReadPart
from shared.data.sources.class_files import FileKind, Listing, is_unfinished, list_files, spread
from shared.data.sources.mel import log_mel, resample
from shared.data.spec import Data
from shared.errors import ConfigError, describe_cause
from shared.runtime.extras import install_command
from shared.runtime.memory import require_room

log = logging.getLogger(__name__)

SOUNDS = FileKind("sound file", (".flac", ".ogg", ".wav"))
RIFF, PIPE_LENGTH = struct.Struct("<4sI"), 0x7FF00000
"""Header of a WAV file, and a length that only a program gives that does not know it."""
MAX_SAMPLE = 1e6
"""Float formats may exceed -1 to 1; from here on, energies exceed float32."""
BATCH_FILES = 2
"""Files whose features are computed at once; more would not fit in a processor's cache."""


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read sound files evenly spread over the split, with at most `most` values in all; None for no limit.

    Inputs have shape (N, 1, bands, frames).

    Raises:
        ConfigError: soundfile or the folder is absent, or a file is damaged or has another sample rate.
    """
    return read_listing(list_files(spec, SOUNDS), spec, most)


def check_file(path: Path, _: Listing, spec: Data) -> None:
    """Decode a sound file; raise as `read_samples`."""
    read_samples(_import_library(), path, spec.mel or Mel())


def read_listing(listing: Listing, spec: Data, most: int | None) -> ReadPart:
    """Read listed sound files; raise as `read_part`."""
    mel = spec.mel or Mel()
    for line in listing.notes():
        log.warning("%s: %s", listing.place, line)
    values, all_labels = mel.bands * mel.frames, np.array(listing.labels, dtype=np.int64)
    chosen = spread(len(listing.files), len(listing.files) if most is None else max(1, most // values))
    require_room(len(chosen) * values * FLOAT_BYTES, listing.place)
    notes = tuple(listing.notes())
    listing.select(chosen)
    inputs, complete = _read_features(listing.files, mel, spec)
    listing.select(complete)
    labels = np.array(listing.labels, dtype=np.int64)
    names = normalise_class_names(listing.classes) if spec.has_classes else ()
    identities = listing.identities() if spec.is_held_out_by_hash else None
    arrays = Arrays(inputs, labels, None, names, identities)
    return ReadPart(arrays, labels if most is None else all_labels, notes)


def _read_features(paths: Sequence[Path], mel: Mel, spec: Data) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the features of all files but those that are being written, and the places of these files."""
    library = _import_library()
    features = np.empty((len(paths), 1, mel.bands, mel.frames), dtype=np.float32)
    complete: list[int] = []
    batch = np.zeros((BATCH_FILES, mel.samples), dtype=np.float32)
    for first in range(0, len(paths), BATCH_FILES):
        count, begin = 0, len(complete)
        for place in range(first, min(first + BATCH_FILES, len(paths))):
            try:
                samples = read_samples(library, paths[place], mel)
            except ConfigError:
                if is_unfinished(paths[place], spec):
                    continue
                raise
            batch[count, : len(samples)] = samples
            batch[count, len(samples) :] = 0
            complete.append(place)
            count += 1
        features[begin : begin + count] = log_mel(batch[:count], mel)
    return features[: len(complete)], np.array(complete, dtype=np.int64)


def _import_library() -> ModuleType:
    try:
        import soundfile  # noqa: PLC0415 - only this source needs it
    except (ImportError, OSError) as error:  # OSError: libsndfile is absent
        what = f"source audio needs soundfile, which cannot be loaded ({error})"
        raise ConfigError(f"{what}: {install_command('audio')}") from error
    library: ModuleType = soundfile
    return library


def read_samples(library: ModuleType, path: Path, mel: Mel) -> NDArray[np.float32]:
    """Read the first `mel.seconds` of a file at `mel.rate_hz`, of shape (samples,), at most `mel.samples`.

    Raises:
        ConfigError: The file is damaged or empty, or has another sample rate and `mel.resample` is not set.
    """
    try:
        _require_complete(path)
        with library.SoundFile(path) as file:
            rate_hz = file.samplerate
            if rate_hz != mel.rate_hz and not mel.resample:
                raise ConfigError(
                    f"{path}: has a sample rate of {rate_hz} Hz, not {mel.rate_hz}; convert it, or set mel.resample"
                )
            count = math.ceil(mel.samples * rate_hz / mel.rate_hz)
            samples: NDArray[np.float32] = file.read(count, dtype="float32", always_2d=True)
    except (library.SoundFileError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged sound file ({describe_cause(error)}); replace or remove it") from error
    if not round(len(samples) * mel.rate_hz / rate_hz):
        raise ConfigError(f"{path}: holds no sound; replace or remove it")
    if not max(samples.max(), -samples.min()) <= MAX_SAMPLE:
        raise ConfigError(f"{path}: holds samples that are NaN, infinite or above {MAX_SAMPLE:g}; replace or remove it")
    mono = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    if rate_hz != mel.rate_hz:
        mono = resample(mono, rate_hz, mel.rate_hz)
    return mono[: mel.samples]


def _require_complete(path: Path) -> None:
    """Refuse a WAV file that ends before the length in its header, which libsndfile does not report.

    Raises:
        ConfigError: It ends early; programs that write to a pipe give the largest possible length.
    """
    with path.open("rb") as file:
        header, size = file.read(RIFF.size), os.fstat(file.fileno()).st_size
    if len(header) == RIFF.size and header.startswith(b"RIFF"):
        length = RIFF.unpack(header)[1]
        if size + 1 < RIFF.size + length < PIPE_LENGTH:
            raise ConfigError(
                f"{path}: damaged sound file (it ends {RIFF.size + length - size} bytes early); replace or remove it"
            )
