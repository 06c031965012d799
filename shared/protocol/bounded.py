"""Bounded field types for messages and manifests, validated on decoding.

A received string becomes part of a path or a log line sooner or later, a received number part of a sum or a record.
msgspec checks these bounds when it decodes; NaN and infinity are outside every range.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from msgspec import Meta

MOST_VERSION = 999_999_999
MOST_NUMBER = 1 << 40
"""Far above any count, round or size in bytes, and far below what 64 bits hold."""
MOST_FIGURE = 1e15
"""Limit of seconds, joules and the like; products of several still fit into a double."""

_RELEASE_NAME = (
    r"\A(?!(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|\Z))[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?\Z"
)

Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""Name of a site, a device or a run, see `shared.protocol.topics.is_name`."""
NameOrNone: TypeAlias = Annotated[str, Meta(pattern=r"\A(?:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")]
ReleaseName: TypeAlias = Annotated[str, Meta(pattern=_RELEASE_NAME)]
"""Name of a model and of its folder on devices: without a final dot, and no device name of Windows."""
Line: TypeAlias = Annotated[str, Meta(pattern=r"\A[ -~]{0,256}\Z")]
"""Printable ASCII that is shown or logged."""
Word: TypeAlias = Annotated[str, Meta(pattern=r"\A[ -~]{1,256}\Z")]
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Version: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_VERSION)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
Number: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
"""Counted from 1, such as a round."""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=MOST_FIGURE)]


def is_release_name(name: str) -> bool:
    """Check whether a model may have this name."""
    return re.search(_RELEASE_NAME, name) is not None
