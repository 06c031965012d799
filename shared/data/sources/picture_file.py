"""Decode one picture file: EXIF orientation, size limits, damage that decoders ignore.

Cameras store a picture as the sensor was held and note how to turn it. Decoders of JPEG and WebP do not report the
zeros that a power cut leaves in a file, and return grey or garbage for that part.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError, describe_cause
from shared.runtime.extras import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

Mode: TypeAlias = Literal["L", "RGB"]
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow detects the format by content, and runs Ghostscript on PostScript; so formats are listed."""
DAMAGE = (OSError, EOFError, ValueError, SyntaxError, LookupError, OverflowError, TypeError, struct.error, zlib.error)
"""Exceptions that Pillow raises on damaged files."""
GREY = frozenset(("1", "L"))
INDEXED = GREY | {"P"}
"""Modes of one byte or bit a pixel."""
NEAREST, BILINEAR = 0, 2
"""Values of `PIL.Image.Resampling`."""
EIGHT_BIT = GREY | frozenset(("CMYK", "HSV", "LA", "P", "PA", "RGB", "RGBA", "YCbCr"))
MAX_PIXELS = 1 << 25
"""Limit per picture, 33 million; a few kilobytes of PNG may expand to more."""
ORIENTATION = 0x0112
"""EXIF tag of the rotation to apply, 1 (none) to 8."""
SIDEWAYS = frozenset((5, 6, 7, 8))
ZERO_RUN = bytes(128)
"""A run of zeros that means damage: in JPEG's usual code, 340 equal coefficients in a row."""
_MARKER = re.compile(rb"\xff+[\x01-\xcf\xd8-\xfe]")
"""Ends the compressed data of a JPEG scan; 0xFF00 is data, 0xFFD0 to 0xFFD7 are restarts within it."""
_SEGMENT = re.compile(rb"\xff+([^\xff])")
_EOI, _SOS, _DHT, _SOF_PROGRESSIVE = 0xD9, 0xDA, 0xC4, 0xC2
_SCAN_TAIL = 3
_CODE_LENGTHS = 16


class Header(NamedTuple):
    """Header of a picture; width and height are those of the upright picture."""

    width: int
    height: int
    mode: str


def read_header(path: Path) -> Header:
    """Read a picture's header without decoding its pixels.

    Raises:
        ConfigError: Pillow is absent, or the file is not a picture, too large, or has other than 8 bits a channel.
    """
    with _open_picture(path, path) as picture:
        _require_readable(picture, path)
        width, height = picture.size
        if _read_orientation(picture) in SIDEWAYS:
            width, height = height, width
        return Header(width, height, picture.mode)


def _require_readable(picture: Image, path: Path) -> None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ConfigError(f"{path}: is {width}x{height} pixels, more than {MAX_PIXELS} in all; make it smaller")
    if picture.mode not in EIGHT_BIT:
        raise ConfigError(
            f"{path}: has pixels of more than 8 bits (mode {picture.mode}); convert it to 8 bits a channel"
        )


def decode(path: Path, mode: Mode | None, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Decode an upright picture to shape (height, width) or (height, width, 3).

    Args:
        mode: Grey or colour; None for grey if the picture is.
        size: Height and width to resize it to, bilinear with antialiasing; None for its own.

    Raises:
        ConfigError: The picture is damaged, too large, or has other than 8 bits a channel.
    """
    with _open_complete(path) as picture:
        _require_readable(picture, path)
        natural = "L" if picture.mode in GREY else "RGB"
        turned = _turn(picture.convert(mode or natural), _read_orientation(picture))
        return np.asarray(turned if size is None else turned.resize(size[::-1], BILINEAR))


def decode_mask(path: Path, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Decode an upright mask to its pixel values or palette indices, uint8 of shape (height, width).

    Args:
        size: Height and width to resize it to, by the nearest pixel; None for its own.

    Raises:
        ConfigError: The picture is damaged, or in colour.
    """
    with _open_complete(path) as picture:
        if picture.mode not in INDEXED:
            raise ConfigError(f"{path}: a mask of mode {picture.mode}; save classes as grey values or a palette")
        if picture.format == "JPEG":
            raise ConfigError(f"{path}: a mask in JPEG, which changes the classes of pixels; save it as PNG")
        turned = _turn(picture, _read_orientation(picture))
        return np.asarray(turned if size is None else turned.resize(size[::-1], NEAREST)).astype(np.uint8)


@contextmanager
def _open_complete(path: Path) -> Iterator[Image]:
    """Open a picture whose data are complete; damage found inside the block is named."""
    try:
        data = path.read_bytes()
        if problem := find_lost_data(data):
            raise ConfigError(f"{path}: damaged picture ({problem}); replace or remove it")
        with _open_picture(io.BytesIO(data), path) as picture:
            yield picture
    except DAMAGE as error:
        raise ConfigError(f"{path}: damaged picture ({describe_cause(error)}); replace or remove it") from error


def _open_picture(file: Path | io.BytesIO, path: Path) -> Image:
    """Open a picture without decoding it."""
    library = _import_library()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `MAX_PIXELS` is the limit here; damaged metadata does no harm to pixels
            picture: Image = library.open(file, formats=FORMATS)
            return picture
    except (*DAMAGE, library.DecompressionBombError) as error:
        cause = describe_cause(error)
        if isinstance(error, library.UnidentifiedImageError):
            cause = "it is empty" if path.exists() and not path.stat().st_size else "its format is unknown"
        raise ConfigError(f"{path}: not a picture that Pillow can read ({cause}); replace or remove it") from error


def _import_library() -> ModuleType:
    """Import Pillow with the plugins of `FORMATS` alone; `Image.open` would import all of them otherwise."""
    try:
        from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401, PLC0415 - only this source needs it
    except ImportError as error:
        raise ConfigError(f"source folder needs Pillow, which is absent: {install_command('images')}") from error
    Image.preinit()
    library: ModuleType = Image
    return library


def _read_orientation(picture: Image) -> int:
    """Read the EXIF orientation; 1 (upright) where it is absent or damaged."""
    if picture.format == "TIFF" or (picture.format == "PNG" and "exif" not in picture.info):
        return 1  # Pillow turns TIFF itself; for a late EXIF chunk of PNG it would have to decode all pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return int(picture.getexif().get(ORIENTATION, 1))
    except DAMAGE:
        return 1


def _turn(picture: Image, orientation: int) -> Image:
    from PIL.Image import Transpose  # noqa: PLC0415 - as above

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return picture.transpose(turns[orientation]) if orientation in turns else picture


def find_lost_data(data: bytes) -> str:
    """Describe lost data that the decoder would not report; empty where there is none."""
    if data.startswith(b"\xff\xd8"):
        return _find_lost_jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        lost = any(ZERO_RUN in chunk for name, chunk in _webp_chunks(data) if name in (b"VP8 ", b"VP8L", b"ANMF"))
        return "a part of it is zeros" if lost else ""
    return ""


def _find_lost_jpeg(data: bytes) -> str:
    """Walk over the segments to the end of the picture; data after that, such as a second picture, does not count."""
    place, tables, is_progressive = 2, dict[int, int](), False
    while marker := _SEGMENT.match(data, place):
        place, kind = marker.end(), marker[1][0]
        if kind == _EOI:
            return ""
        segment = data[place + 2 : place + int.from_bytes(data[place : place + 2], "big")]
        place += 2 + len(segment)
        is_progressive |= kind == _SOF_PROGRESSIVE
        if kind == _DHT:
            tables |= _first_ac_symbols(segment)
        if kind == _SOS:
            end = _MARKER.search(data, place)
            if end is None:
                return "it ends before its end mark"
            has_zeros = data.find(ZERO_RUN, place, end.start()) >= 0
            if has_zeros and not _may_be_zeros(segment, tables, is_progressive=is_progressive):
                return "a part of it is zeros"
            place = end.start()
    return "it ends before its end mark"


def _may_be_zeros(scan: bytes, tables: Mapping[int, int], *, is_progressive: bool) -> bool:
    """Check whether zeros are valid in a scan, as a repeated end-of-block symbol.

    Args:
        tables: Symbol with an all-zero code, by AC table.
        is_progressive: If so, DC scans and refinement scans may hold zeros too.
    """
    if is_progressive and (len(scan) < _SCAN_TAIL or not scan[-3] or scan[-1] >> 4):
        return True
    return all(not symbol & 15 for symbol in tables.values())


def _first_ac_symbols(tables: bytes) -> dict[int, int]:
    """Return the symbol with an all-zero code of each AC table in a segment."""
    symbols = dict[int, int]()
    while len(tables) > _CODE_LENGTHS + 1:
        if tables[0] >> 4:
            symbols[tables[0]] = tables[_CODE_LENGTHS + 1]
        tables = tables[_CODE_LENGTHS + 1 + sum(tables[1 : _CODE_LENGTHS + 1]) :]
    return symbols


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        yield data[place : place + 4], data[place + 8 : place + 8 + size]
        place += 8 + size + size % 2
